"""Build a timm model by its name, and explain in one line why one cannot be built."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import timm
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from timm.models import get_deprecated_models
from torch import nn

from remtta.errors import CheckpointError, DownloadError, ModelError, RemttaError, UsageError, logging_at
from remtta.models.checkpoints import most_bytes
from remtta.models.metadata import TimmModel
from remtta.options import ModelOptions
from remtta.options.loaders import find_loaders, missing_loaders

_LOCAL, _HUB = "local-dir:", "hf-hub:"
_SOURCES = ("local-dir", "hf-hub", "hf_hub", "timm")  # of timm's models, before a colon
_MIN_SIMILARITY = 0.7  # difflib's ratio below which names have little in common
_MAX_SUGGESTIONS = 3
_MAX_BYTES = 2**36  # of weights: twice timm's largest model
_DAMAGE = (
    *(TypeError, AttributeError, LookupError, ArithmeticError, RecursionError),
    *(json.JSONDecodeError, UnicodeDecodeError),
)
"""Raised by timm at a config.json that it did not write."""

_log = logging.getLogger(__name__)


def create(name: str, options: ModelOptions, *, pretrained: bool) -> TimmModel:
    """Build a timm model with the other options; models that accept any input size ignore the one given.

    A checkpoint is read later, but a model that is far larger is rejected here. Raise UsageError if the name is
    unknown, or the model does not accept an argument; ModelError if it cannot be built; CheckpointError if its folder
    is damaged; DownloadError if its weights cannot be downloaded.
    """
    if (current := current_name(name)) != name:
        _log.info("timm calls %s %s now", name, current)
        name = current
    _check_name(name)
    kwargs, size = dict(options.model_kwargs), options.input_size
    if options.num_classes is not None:
        kwargs["num_classes"] = options.num_classes
    local = name.startswith(_LOCAL)
    if size is not None:
        kwargs["img_size"] = tuple(size)
    if (kwargs or local) and not name.startswith(_HUB):
        check_size(name, options.checkpoint, partial(timm.create_model, name, pretrained=False, **kwargs))
    if pretrained and not local:
        _log.info("loading the pretrained weights of %s (downloaded on first use)", name)
    remote = not local and (pretrained or ":" in name)
    try:
        with reachable_or_offline() if remote else contextlib.nullcontext():
            model = timm.create_model(name, pretrained=pretrained, **kwargs)
    except Exception as error:  # timm and its download libraries share no base class
        if isinstance(error, TypeError) and size is not None and "img_size" in str(error):
            return create(name, replace(options, input_size=None), pretrained=pretrained)
        raise _creation_failure(name, pretrained, error) from error
    if size is not None:
        _check_patches(model, size)
    return model


def current_name(name: str) -> str:
    """Return timm's present name of a model, which may be given by one of an earlier version."""
    return get_deprecated_models().get(name) or name


def _check_patches(model: TimmModel, input_size: tuple[int, int]) -> None:
    """Raise UsageError if patches of a ViT would leave out the edge of images of this size."""
    embed = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    if not isinstance(patch, tuple) or getattr(embed, "dynamic_img_pad", False):
        return
    for side, patch_side in zip(input_size, patch, strict=True):
        if rest := side % patch_side:
            raise UsageError(
                f"--input-size {side} is not a multiple of the patch size {patch_side}; "
                f"choose {side - rest} or {side - rest + patch_side}"
            )


def _check_name(name: str) -> None:
    models = timm.list_models()
    if ":" not in name and name.partition(".")[0] not in models:
        close = [model for model in models if model.startswith(name)][:_MAX_SUGGESTIONS]
        named = [loader.names for loader in find_loaders().values() if loader.is_bundled]
        close = close or difflib.get_close_matches(name, [*models, *named], _MAX_SUGGESTIONS, _MIN_SIMILARITY)
        hint = f"did you mean {', '.join(close)}?" if close else "remtta models lists the families that can be adapted"
        if "/" in name or Path(name).is_dir():
            hint = f"a folder is local-dir:{name}, a hub repository hf-hub:{name}, a file goes to --checkpoint"
        raise UsageError(f'unknown model "{name}"; {hint}{missing_loaders()}')
    if ":" in name and name.partition(":")[0].lower() not in _SOURCES:
        raise UsageError(f'no loader takes "{name}"{missing_loaders()}')
    if name == _HUB:
        raise UsageError(f"{name} names no repository; write {_HUB}OWNER/NAME")
    if name.startswith(_LOCAL) and not Path(name.removeprefix(_LOCAL), "config.json").is_file():
        raise UsageError(f"{name}: no such folder with a config.json")
    if ":" not in name and "." in name and name not in timm.list_pretrained():
        architecture = name.partition(".")[0]
        known = sorted({*timm.list_pretrained(f"{architecture}.*")}) or [architecture]
        raise UsageError(f'unknown weights "{name}"; choose {", ".join(known)}')


def check_size(name: str, checkpoint: str | Path | None, build: Callable[[], nn.Module]) -> None:
    """Raise if a model is far larger than its weights file, or than any model, before it takes memory."""
    local = name.startswith(_LOCAL)
    try:
        # Without memory, and without warnings, which follow when it is built for good.
        with torch.device("meta"), logging_at(logging.ERROR, logging.getLogger("remtta")):
            model = build()
    except Exception as error:  # building the model fails in the same way, and reports it
        _log.debug("the size of %s is not known beforehand: %s", name, error)
        return
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    files = Path(name.removeprefix(_LOCAL)).iterdir() if local and checkpoint is None else [Path(checkpoint or "")]
    largest = max((file.stat().st_size for file in files if file.is_file()), default=0)
    if num_bytes > min(_MAX_BYTES, most_bytes(largest) if largest else _MAX_BYTES):
        text = f"{name} could not be built: it would take {num_bytes / 2**20:,.0f} MiB"
        text += f", but its weights file has only {largest / 2**20:,.1f} MiB" if largest else ""
        raise CheckpointError(f"{text}; its config.json is damaged") if local else ModelError(text)


def _creation_failure(name: str, pretrained: bool, error: Exception) -> RemttaError:
    reason = _reason(error)
    if name.startswith(_LOCAL) and "unexpected keyword argument" not in reason:
        if isinstance(error, _DAMAGE):
            reason = f"its config.json describes no model that can be built ({type(error).__name__}: {reason})"
        return CheckpointError(f"{name} could not be built: {reason}{missing_loaders()}")
    if isinstance(error, TypeError):
        return UsageError(f"{name} does not take these model arguments: {reason}")
    offline = isinstance(error, OSError) or ("Error" in type(error).__name__ and "hub" in type(error).__module__)
    if not offline:
        return ModelError(f"{name} could not be built: {reason}")
    if not pretrained:
        return DownloadError(f"the configuration of {name} could not be downloaded; check the network: {reason}")
    return DownloadError(
        f"the pretrained weights of {name} could not be downloaded; check the network, "
        f"or give a weights file with --checkpoint ({type(error).__name__})"
    )


def _reason(error: BaseException) -> str:
    """Return in one line what went wrong, rephrasing unhelpful messages of libraries."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    if "weights_only" in lines[0]:  # torch and timm would suggest to load them nonetheless
        return (
            "its weights hold more than weights and could run code, so they were not loaded; save them as safetensors"
        )
    if isinstance(error, SafetensorError):
        return f"its weights are not a readable safetensors file ({lines[0]})"
    if isinstance(error, MemoryError) or "alloc_cpu" in lines[0] or "overflow" in lines[0]:
        return "it needs more memory than there is"
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


@contextlib.contextmanager
def reachable_or_offline() -> Iterator[None]:
    """Use only weights already downloaded if the hub's name cannot be resolved.

    Otherwise a machine without a network would wait most of a minute through retries, with their messages on standard
    error.
    """
    offline = constants.HF_HUB_OFFLINE
    with logging_at(logging.ERROR, logging.getLogger("huggingface_hub")):
        try:
            constants.HF_HUB_OFFLINE = offline or not _resolves(constants.ENDPOINT)
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline


def _resolves(address: str) -> bool:
    if urllib.request.getproxies().keys() & {"https", "all"}:
        return True  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(address).hostname, 443)
    except OSError:
        return False
    return True
