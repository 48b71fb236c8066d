"""Find the classifier inside wrappers, its head and its layers by tracing a forward pass of one image."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from remtta.errors import ModelError, first_line
from remtta.models.metadata import (
    ModelWithMetadata,
    PretrainedConfig,
    Shape,
    Size,
    TimmModel,
    Trace,
    logits_in,
    metadata_of,
    output_of,
)

_Calls = Mapping[str, tuple[object, object]]
"""The input and output of each layer by its module path, in the order of their calls."""

_SIZES = (224, 32, 64, 28, 96, 128, 160, 192, 240, 256, 288, 299, 320, 336, 384, 448, 512)
"""Image sides, in pixels, to try on a model whose config names no input size."""


class InputTransform:
    """The wrappers' own computation on images (B, 3, H, W), such as normalising, before the classifier."""

    def __init__(self, model: nn.Module, inner: nn.Module) -> None:
        self._model, self._inner = model, inner

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the classifier's input."""
        reached: list[Tensor] = []

        def stop(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            reached.append(inputs[0])
            raise _Reached

        with self._inner.register_forward_pre_hook(stop), contextlib.suppress(_Reached):
            self._model(images.clone())  # which it may change
        if not reached:
            names = type(self._model).__name__, type(self._inner).__name__
            raise ModelError("{} does not call the {} in it any more".format(*names))
        return reached[0]

    @torch.no_grad()
    def normalisation(self, size: Size) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation per channel, for pixels in [0, 1], read off a black and a white image."""
        image = _image(self._inner, size)
        black, white = (self(torch.full_like(image, value)).mean((0, 2, 3)) for value in (0.0, 1.0))
        std = 1 / (white - black)
        return (-black * std).tolist(), std.tolist()


@dataclass(frozen=True)
class UnwrappedModel:
    """A classifier found in its wrappers."""

    module: nn.Module  # the classifier itself
    wrapped: nn.Module  # the model as it was given, with its wrappers
    front: InputTransform | None = None  # what the wrappers do to images, if anything

    @property
    def is_timm(self) -> bool:
        """True if it has the interface of a timm model."""
        return is_timm_model(self.module) and output_of(self.wrapped) is None

    @property
    def resizes(self) -> bool:
        """True if the wrappers resize images."""
        return self.front is not None and self.trace.inner_size != self.trace.input_size

    @property
    def trace(self) -> Trace:
        """The record of one image's forward pass."""
        return trace_of(self.wrapped)

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (B, C) of images (B, 3, H, W) that `front` has transformed."""
        images = images.clone() if self.trace.in_place else images
        return logits_in(self.module(images), output_of(self.wrapped), self.module)


def unwrap_model(model: nn.Module) -> UnwrappedModel:
    """Find the classifier in its wrappers: a timm model, one whose images they normalise, or the model itself.

    A wrapper is skipped if it has no weights of its own and returns the output of the model inside. Raise ModelError if
    it is not an image classifier; the message says what to do.
    """
    outer = _without_wrappers(model)
    if not isinstance(outer, nn.Module):
        got = type(outer).__name__
        raise ModelError(f"the model must be a torch.nn.Module, got {got}; remtta.load_model builds one by name")
    if is_timm_model(outer) and output_of(model) is None:
        return UnwrappedModel(outer, model)
    trace = trace_of(model)
    module = outer.get_submodule(trace.path)
    return UnwrappedModel(module, model, InputTransform(outer, module) if trace.changes_images else None)


def config_of(model: nn.Module) -> PretrainedConfig:
    """Return a model's own metadata on labels, preprocessing and origin, in the form of timm's `pretrained_cfg`."""
    unwrapped = unwrap_model(model)
    config = dict(getattr(unwrapped.module, "pretrained_cfg", None) or {})
    if not unwrapped.is_timm or unwrapped.resizes:
        config["input_size"] = (3, *unwrapped.trace.input_size)
    if not unwrapped.is_timm:
        names = getattr(getattr(unwrapped.module, "config", None), "id2label", None) or {}  # transformers'
        names = {} if list(names.values())[:1] == ["LABEL_0"] else names
        config["label_names"] = config.get("label_names") or names
    if unwrapped.front is not None:
        config |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    if isinstance(model, ModelWithMetadata) and model.preprocessing is not None:
        config |= {**asdict(model.preprocessing), "input_size": (3, *model.preprocessing.input_size)}
    if isinstance(model, ModelWithMetadata) and model.labels is not None:
        config["label_names"] = list(model.labels)
    return config


def num_classes_of(model: nn.Module) -> int:
    """Return the number of classes of a classifier, 0 for a timm model without a head."""
    unwrapped = unwrap_model(model)
    return classes_of_timm(unwrapped.module) if unwrapped.is_timm else unwrapped.trace.num_classes


def classes_of_timm(module: nn.Module) -> int:
    """Return the number of classes of a timm model's head, which may have been replaced; 0 without a head."""
    head: object = getattr(module, "get_classifier", tuple)()
    layers = list(head) if isinstance(head, nn.Sequential) else [head]
    sizes = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    return sizes[-1] if sizes else int(getattr(module, "num_classes", 0) or 0)


def is_timm_model(model: nn.Module) -> TypeGuard[TimmModel]:
    """Return True if a model has the interface of a timm model."""
    return hasattr(type(model), "get_classifier") and hasattr(model, "num_classes")  # PEFT's wrappers forward names


def classifiers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that compute a timm model's logits, by path: one, two if distilled, none of other models."""
    found: object = getattr(model, "get_classifier", tuple)()
    layers = found if isinstance(found, tuple) else (found,)
    return {path: module for path, module in model.named_modules() if any(module is layer for layer in layers)}


@runtime_checkable
class CustomHead(Protocol):
    """A module that computes a model's logits by other means than a linear layer, such as texts."""

    def restricted(self, numbers: Sequence[int]) -> nn.Module:
        """Return a head with some of the classes, in this order."""

    def checkpoint_state(self, state: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
        """Return the state of the model that has this head at a path, in the layout of the checkpoints that build it.

        Raise ModelError if that layout has no place for one of the weights.
        """


def custom_head(model: nn.Module) -> tuple[str, CustomHead] | None:
    """Return a model's custom head and its module path, if it has one."""
    return next(((path, each) for path, each in model.named_modules() if isinstance(each, CustomHead)), None)


def trace_of(model: nn.Module) -> Trace:
    """Send an image through a model, in eval mode, and record the pass; raise ModelError if it takes no image or
    returns no logits; the message says what to do.
    """
    modules, known = [*map(id, model.modules())], metadata_of(model)
    if known.trace is None or known.traced_modules != modules:  # a head may have been replaced since
        modes = {layer: layer.training for layer in model.modules()}
        try:
            known.trace, known.traced_modules = _traced(model), modules
        finally:
            for layer, mode in modes.items():
                layer.training = mode
    return known.trace


def _traced(model: nn.Module) -> Trace:
    outer, output = _without_wrappers(model), output_of(model)
    if isinstance(outer, torch.jit.ScriptModule) or "eval" in vars(outer):  # the latter of torch.export
        kind = type(outer).__name__
        raise ModelError(f"{kind} is a program of torch.jit or torch.export; give the model that it was made from")
    images, after, returned, calls = _run_at_usual_size(outer.eval(), model)
    logits = logits_in(returned, output, outer)
    _check_logits(logits, outer, selected=output is not None)
    path, changed = _classifier_path(outer, calls, images, returned, None if output else logits)
    start = f"{path}." if path else ""
    inner_calls = {name.removeprefix(start): call for name, call in calls.items() if name.startswith(start)}
    inner_images = calls[path][0] if changed else images
    return Trace(
        path=path,
        changes_images=changed,
        input_size=_size(images),
        inner_size=_size(inner_images),
        in_place=not _equal(after, images),
        num_classes=logits.shape[1],
        head=_head_path(outer.get_submodule(path), inner_calls, logits),
        shapes={name: (_shape(entered), _shape(left)) for name, (entered, left) in inner_calls.items()},
    )


def _run_at_usual_size(model: nn.Module, wrapped: nn.Module) -> tuple[Tensor, Tensor, object, _Calls]:
    """Return images of the first size that the model takes, before and after the pass, its output and its calls."""
    problem: Exception | None = None
    for size in _sizes(wrapped):
        images = _image(model, size)
        entered = images.clone()
        try:
            return images, entered, *_run(model, entered)
        except Exception as error:  # whatever a model raises at an image of a size that it does not take
            problem = problem or error
    assert problem is not None
    why = first_line(problem)
    raise ModelError(
        f"{type(model).__name__} takes no image (1, 3, H, W) of a usual size ({why}); for another size, "
        "use remtta.Adapter(model, preprocessing=remtta.Preprocessing((H, W)))"
    )


def _run(model: nn.Module, images: Tensor) -> tuple[object, _Calls]:
    """Return a model's output, and its layers' calls."""
    calls: dict[str, tuple[object, object]] = {}
    inputs_of: dict[str, object] = {}

    def enter(name: str, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        value = inputs[0] if inputs else None
        inputs_of[name] = value.clone() if isinstance(value, Tensor) else value  # it may be changed in place

    def leave(name: str, layer: nn.Module, inputs: object, output: object) -> None:
        calls.pop(name, None)  # its last call counts
        calls[name] = (inputs_of[name], output)

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            hooks.enter_context(layer.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(layer.register_forward_hook(partial(leave, name)))
        return model(images), calls


def _classifier_path(
    model: nn.Module, calls: _Calls, images: Tensor, returned: object, logits: Tensor | None
) -> tuple[str, bool]:
    """Return the path of the classifier inside, and True if its input differs from the model's.

    It is the module that takes images, holds all weights, and returns the model's output or these logits.
    """
    num_weights = len(list(model.parameters()))
    for name, (entered, left) in calls.items():
        layer = model.get_submodule(name)
        takes_images = isinstance(entered, Tensor) and entered.ndim == 4 and entered.shape[1] == 3
        classifies = left is returned or (logits is not None and _equal(getattr(left, "logits", left), logits))
        if takes_images and classifies and len(list(layer.parameters())) == num_weights:
            changed = not _equal(entered, images)
            if changed or is_timm_model(layer):
                return name, changed
    return "", False


def _head_path(module: nn.Module, calls: _Calls, logits: Tensor) -> str | None:
    for name in reversed(list(calls)):
        layer, left = module.get_submodule(name), calls[name][1]
        if not isinstance(layer, nn.Linear | nn.Conv2d) or not isinstance(left, Tensor):
            continue
        if _equal(left if left.ndim < 3 else left.flatten(1), logits):
            return name
    return None


def _shape(value: object) -> Shape:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _size(images: object) -> Size:
    _, _, height, width = _shape(images)
    return height, width


def _check_logits(logits: Tensor, model: nn.Module, *, selected: bool) -> None:
    """Raise ModelError if they are probabilities; `selected` is whether a function of the caller selected them."""
    shares = not logits.is_meta and logits.shape[1] > 1 and bool((logits >= 0).all())
    if shares and torch.allclose(logits.sum(1), torch.ones_like(logits[:, 0]), atol=1e-4):
        what, remedy = (
            f"{type(model).__name__} returns",
            "remtta.Adapter(model, output=lambda p: p.clamp(min=1e-9).log())",
        )
        if selected:
            what, remedy = "output= selects", "add .clamp(min=1e-9).log()"
        raise ModelError(f"{what} probabilities, and their logarithms are needed: {remedy}")


def _sizes(model: nn.Module) -> Iterator[Size]:
    """Yield the image sizes to try, the most likely first."""
    if isinstance(model, ModelWithMetadata) and model.preprocessing is not None:
        yield model.preprocessing.input_size
        return
    names = ("image_size", "img_size")
    for layer in model.modules():
        named = [getattr(owner, name, None) for owner in (layer, getattr(layer, "config", None)) for name in names]
        named.append((getattr(layer, "pretrained_cfg", None) or {}).get("input_size", ())[1:])
        for size in named:
            if isinstance(size, int) or (isinstance(size, tuple | list) and len(size) == 2):
                yield (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    yield from ((side, side) for side in _SIZES)


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model without wrappers that only run it (parallel, compiled) or describe it."""
    while True:
        if isinstance(model, ModelWithMetadata | nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _image(model: nn.Module, size: Size) -> Tensor:
    """Return an image (1, 3, H, W) of different pixels, with the weights' device and dtype."""
    return torch.linspace(0, 1, 3 * size[0] * size[1]).view(1, 3, *size).to(floating_weight(model))


def floating_weight(model: nn.Module) -> Tensor:
    """Return the first weight of a model that has a floating-point dtype, which its images have, too."""
    return next((weight for weight in model.parameters() if weight.is_floating_point()), torch.empty(0))


def _equal(value: object, tensor: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != tensor.shape:
        return False
    return value is tensor or (not tensor.is_meta and torch.equal(value, tensor))


class _Reached(Exception):
    """Ends a forward pass where the images reach the model inside."""
