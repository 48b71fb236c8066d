"""State dicts of torchvision's models, compared with torchvision itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import ConvNeXt, ResNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck

from remtta.models.checkpoints import checkpoint_dtypes
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _convnext() -> Any:
    widths = [8, 12, 16, 20]
    blocks = [CNBlockConfig(*each) for each in zip(widths, [*widths[1:], None], [1, 1, 2, 1], strict=True)]
    return ConvNeXt(blocks, num_classes=7)


SWIN = {"depths": (2, 2, 2), "num_heads": (2, 4, 4)}
KINDS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "resnet": (
        lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=7, width_per_group=8),
        "wide_resnet50_2",
        {"layers": (1, 1, 1, 1), "base_width": 8},
    ),
    "vit": (
        lambda: VisionTransformer(32, 8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=96, num_classes=7),
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    ),
    "swin": (
        lambda: SwinTransformer([2, 2], 12, [2, 2, 2], [2, 4, 4], [4, 4], num_classes=7),
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "patch_size": 2, "embed_dim": 12, "window_size": 4, **SWIN},
    ),
    "convnext": (_convnext, "convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20)}),
}


def _random(model: Any, seed: int = 0) -> Any:
    """With weights that leave nothing as it was built: no zeros, no ones, logits far from uniform."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = 0.2 * torch.randn_like(tensor) + (tensor.ndim == 1) * 0.5
                tensor.copy_(noise.abs() + 0.1 if name.endswith("running_var") else noise)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_torchvision(kind: str, tmp_path: Path) -> None:
    make, name, kwargs = KINDS[kind]
    wrap = "module." if kind == "vit" else ""
    theirs, path = _random(make()), tmp_path / "theirs.pth"
    torch.save({f"{wrap}{name}": tensor for name, tensor in theirs.state_dict().items()}, path)
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
    make, name, kwargs = KINDS["vit"]
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
