"""Some of a model's classes only."""

from typing import Any

import pytest
import torch
from torch import nn

from remtta import REM, REMConfig
from remtta.errors import ModelError
from remtta.lab.heads import restricted_classes
from tests.backbones.tiny_models import images_for, pictures, tiny, transformer
from tests.conftest import NUM_CLASSES, tiny_vit

TRANSFORMERS = ("distilled", "attention pool", "BEiT")


@pytest.mark.parametrize("family", ["resnet", "convnext", "swin", "mobilenetv3", *TRANSFORMERS])
@torch.no_grad()
def test_every_family_answers_with_the_chosen_classes_and_then_with_all(family: str) -> None:
    known = family in TRANSFORMERS
    model: Any = transformer(family) if known else tiny(family)
    images = images_for(family) if known else pictures(2)
    whole, config = model(images), model.pretrained_cfg
    with restricted_classes(model, [5, 0, 3]):
        torch.testing.assert_close(model(images), whole[:, [5, 0, 3]])
        assert model.num_classes == model.pretrained_cfg["num_classes"] == 3
        if family == "swin":
            rem = REM(model, REMConfig((0.0, 0.25), lr=1e-6))
            assert rem(images).shape == (len(images), 3)
            rem.reset()
    assert (model.num_classes, model.pretrained_cfg) == (NUM_CLASSES, config)
    assert torch.equal(model(images), whole)


def test_heads_that_are_no_linear_layer_of_a_timm_model_keep_their_classes() -> None:
    model: Any = tiny_vit()
    model.head = nn.Sequential(model.head)
    refusal = "the model's head is not a linear layer, so its classes cannot be restricted"
    with pytest.raises(ModelError, match=refusal), restricted_classes(model, [0, 2]):
        pass
    with pytest.raises(ModelError, match="Linear is not a timm model"), restricted_classes(nn.Linear(2, 3), [0, 2]):
        pass
