"""Classifiers restricted to some of their classes, as the protocols of ImageNet-R and ImageNet-A require."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from remtta.errors import ModelError
from remtta.models.info import labels_of
from remtta.models.unwrapping import CustomHead, classifiers_of, custom_head, is_timm_model


@contextlib.contextmanager
def restricted_classes(model: nn.Module, numbers: Sequence[int] | None) -> Iterator[None]:
    """Restrict a timm classifier to some of its classes, in this order, within the block, if there are numbers.

    Losses and thresholds of every method then refer only to these classes. Raise ModelError if its logits are not
    computed by linear layers, or it is not a timm model.
    """
    if numbers is None:
        yield
        return
    if not (whole := _heads(model)) or not is_timm_model(model):
        raise ModelError(
            f"{type(model).__name__} is not a timm model, so its classes cannot be restricted; "
            "dataclasses.replace(dataset, restricted_to=None) leaves them whole"
        )
    num_classes, config, labels = model.num_classes, model.pretrained_cfg, labels_of(model)
    names = None if labels is None else [labels[number] for number in numbers]
    try:
        _put(model, {path: _restricted(head, path, numbers) for path, head in whole.items()})
        model.num_classes = len(numbers)
        model.pretrained_cfg = {**config, "num_classes": len(numbers), "label_names": names}
        yield
    finally:
        _put(model, whole)
        model.num_classes, model.pretrained_cfg = num_classes, config


def restricted_tensors(tensors: Mapping[str, Tensor], model: nn.Module, numbers: Sequence[int]) -> dict[str, Tensor]:
    """Return a delta's tensors for a model that is about to be restricted to these classes."""
    heads, kept = _heads(model), list(numbers)
    return {
        name: tensor[kept] if _is_of(name, heads) and len(tensor) > max(kept) else tensor
        for name, tensor in tensors.items()
    }


def whole_tensors(
    tensors: Mapping[str, Tensor], model: nn.Module, numbers: Sequence[int], num_classes: int
) -> dict[str, Tensor]:
    """Return a delta's tensors of a restricted model for the whole one; the other classes do not change."""
    heads, whole = _heads(model), dict(tensors)
    for name in tensors if len(numbers) < num_classes else ():
        if _is_of(name, heads):
            whole[name] = tensors[name].new_zeros(num_classes, *tensors[name].shape[1:])
            whole[name][list(numbers)] = tensors[name]
    return whole


def _is_of(name: str, heads: Mapping[str, nn.Module]) -> bool:
    return name.rpartition(".")[0] in heads


def _heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's custom head, or else its own classifiers, by path."""
    found = custom_head(model)
    return {found[0]: model.get_submodule(found[0])} if found else classifiers_of(model)


def _put(model: nn.Module, heads: dict[str, nn.Module]) -> None:
    for path, head in heads.items():
        model.set_submodule(path, head)


def _restricted(head: nn.Module, path: str, numbers: Sequence[int]) -> nn.Module:
    if isinstance(head, CustomHead):
        return head.restricted(numbers)
    if not isinstance(head, nn.Linear | nn.Conv2d):  # a convolution with one position, as in BiT
        raise ModelError(f"the model's {path} is not a linear layer, so its classes cannot be restricted")
    kept, rows = copy.deepcopy(head), torch.tensor(list(numbers), device=head.weight.device)
    kept.weight = nn.Parameter(head.weight.detach()[rows], head.weight.requires_grad)
    if head.bias is not None:
        kept.bias = nn.Parameter(head.bias.detach()[rows], head.bias.requires_grad)
    if isinstance(kept, nn.Linear):
        kept.out_features = len(numbers)
    else:
        kept.out_channels = len(numbers)
    return kept
