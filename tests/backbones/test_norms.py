from typing import Any

import pytest
import timm
import torch
from torch import nn

from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError, UsageError
from tests.conftest import tiny_vit


def _names(*blocks: int) -> list[str]:
    return [f"blocks.{b}.{n}.{p}" for b in blocks for n in ("norm1", "norm2") for p in ("weight", "bias")]


@pytest.mark.parametrize(("choice", "tensors", "parameters"), [(None, 36, 27_648), ("all", 50, 38_400)])
def test_vit_base_adapts_as_many_parameters_as_in_the_paper(choice: str | None, tensors: int, parameters: int) -> None:
    with torch.device("meta"):
        vit = backbone_of(timm.create_model("vit_base_patch16_224"))
    chosen = adapted_norms(vit, choice)
    assert len(chosen) == tensors
    assert sum(parameter.numel() for parameter in chosen.values()) == parameters


@pytest.mark.parametrize(
    ("choice", "blocks"),
    [(None, (0, 1, 2)), ("0-1", (0, 1)), ("0,2", (0, 2)), ("3", (3,)), ("0,2-3", (0, 2, 3)), (" 2, 0-1, 1", (0, 1, 2))],
)
def test_blocks_are_chosen_by_number_and_listed_in_model_order(choice: str | None, blocks: tuple[int, ...]) -> None:
    vit = tiny_vit(depth=4)
    chosen = adapted_norms(backbone_of(vit), choice)
    assert list(chosen) == _names(*blocks)
    parameters = dict(vit.named_parameters())
    assert all(parameter is parameters[name] for name, parameter in chosen.items())


def test_auto_is_all_with_batch_norms_and_else_three_quarters() -> None:
    vit, net = backbone_of(tiny_vit(depth=4)), backbone_of(timm.create_model("test_efficientnet"))
    assert list(adapted_norms(vit, "auto")) == list(adapted_norms(vit)) == _names(0, 1, 2)
    chosen = list(adapted_norms(net, "auto"))
    assert chosen == list(adapted_norms(net, "all")) and len(chosen) > len(adapted_norms(net))


def test_norms_are_found_by_their_kind_not_their_name() -> None:
    chosen = adapted_norms(backbone_of(tiny_vit(norm_layer="rmsnorm")), "1")
    assert list(chosen) == ["blocks.1.norm1.weight", "blocks.1.norm2.weight"]


UNREADABLE = ["", " ", "a", "-1", "1-", "0,,1", "0;1", "0-1-2", "ALL", "0.5", "1 2"]
NOT_THERE = {"4": "4", "0-11": "11", "3-1": "3-1", "0,9,1": "9"}
CANNOT_READ = 'cannot read the adapted layers "{}"; write "all", "auto" or block numbers such as "0-8"'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, CANNOT_READ.format(text)) for text in UNREADABLE),
        *((text, f"no block {block}: the model has blocks 0-3") for text, block in NOT_THERE.items()),
    ],
)
def test_a_choice_of_no_blocks_of_the_model_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        adapted_norms(backbone_of(tiny_vit(depth=4)), text)
    assert str(caught.value) == told


def test_a_model_too_shallow_for_three_quarters_needs_named_blocks() -> None:
    vit = backbone_of(tiny_vit(depth=1))
    told = r"the first three quarters of 1 block hold no whole block; name the blocks with --adapt-layers, or all"
    with pytest.raises(ModelError, match=told):
        adapted_norms(vit)
    assert list(adapted_norms(vit, "0")) == _names(0)
    assert list(adapted_norms(vit, "auto")) == list(adapted_norms(vit, "all"))


def test_the_vit_is_found_inside_a_compiled_model() -> None:
    vit, compiled = tiny_vit(depth=1), nn.Module()
    compiled._orig_mod = vit
    assert backbone_of(compiled).module is vit


def test_blocks_without_norm_weights_leave_nothing_to_adapt() -> None:
    bare: Any = tiny_vit(depth=4)
    for block in bare.blocks:
        block.norm1 = block.norm2 = nn.Identity()
    with pytest.raises(ModelError, match="the chosen blocks have no normalisation weights"):
        adapted_norms(backbone_of(bare))
