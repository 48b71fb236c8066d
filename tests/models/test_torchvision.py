"""State dicts of torchvision's models, compared with torchvision itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from remtta.models.checkpoints import checkpoint_dtypes
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of
from tests.models.other_libraries import TORCHVISION, randomised

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("family", TORCHVISION)
def test_logits_are_those_of_torchvision(family: str, tmp_path: Path) -> None:
    make, name, kwargs = TORCHVISION[family]
    theirs, path = randomised(make()), tmp_path / "theirs.pth"
    torch.save({"loss.w": torch.ones(1), **{f"net.{key}": value for key, value in theirs.state_dict().items()}}, path)
    ours = load_model(name, checkpoint=path, num_classes=7, model_kwargs=kwargs)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 0.05
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)
    assert (preprocessing_of(ours).mean, preprocessing_of(ours).std) == (MEAN, STD)
    given = load_model(name, checkpoint=path, num_classes=7, model_kwargs=kwargs, mean=(0.5, 0.5, 0.5))
    assert (preprocessing_of(given).mean, preprocessing_of(given).std) == ((0.5, 0.5, 0.5), STD)
    assert checkpoint_dtypes(ours, path).keys() == ours.state_dict().keys()


def test_an_older_vit_is_read(tmp_path: Path) -> None:
    make, name, kwargs = TORCHVISION["vit"]
    theirs = make()
    state = {
        old.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for old, tensor in theirs.state_dict().items()
    }
    loaded = []
    for number, weights in enumerate((state, theirs.state_dict())):
        save_file(weights, tmp_path / f"{number}.safetensors")
        path = tmp_path / f"{number}.safetensors"
        loaded.append(load_model(name, checkpoint=path, num_classes=7, model_kwargs=kwargs).state_dict())
    torch.testing.assert_close(*loaded, rtol=0, atol=0)
