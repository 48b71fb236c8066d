"""Loaders, which build a classifier from a name, a file or a folder. Imports no torch."""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remtta.errors import UsageError, check_installed
from remtta.extensions import Extension, built_in, missing, usable
from remtta.options.option import OptionField, option_fields

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from remtta.options.model import ModelOptions

    Delta = Any  # remtta.deltas.Delta, of a layer above

OnTexts = Callable[[int, int], None]
"""Called with the progress of class embeddings: the number of sentences done, and the total."""

OPTIONAL = ("checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size")
"""Options of every model that a loader may not take."""

_ANY_NAME = "timm"

_log = logging.getLogger(__name__)


class Loader(abc.ABC):
    """Loads the models that it matches. Its module imports torch only in `load`, so that `--help` is fast.

    Attributes:
        names: The values of --model that it takes, for help and messages.
        suffixes: Suffixes of files that are whole models, which --model names, and --checkpoint does not.
        options: A dataclass of options of its own, which commands offer beside those of every model.
        takes: Those that it takes of checkpoint, use_ema, num_classes, model_kwargs and input_size; others are refused.
        packages: Optional packages that it needs, each with the extra of remtta that installs it.
        imports: Modules that `load` needs, imported beforehand in one go.
        default_method: The method where the user names none: "fast" for models without gradients.
        has_own_devices: Its models compute where `load` puts them, and are not moved.
        is_bundled: The weights come with the package, so that nothing is downloaded or opened.
    """

    names: str = ""
    suffixes: tuple[str, ...] = ()
    options: type | None = None
    takes: tuple[str, ...] = ("input_size",)
    packages: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()
    default_method: str = "remtta"
    has_own_devices: bool = False
    is_bundled: bool = False

    def matches(self, options: ModelOptions) -> bool:
        """Return whether it loads this model, without opening large files."""
        return bool(self.suffixes) and str(options.name).lower().endswith(self.suffixes)

    @abc.abstractmethod
    def load(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        """Return the classifier with its weights; its own preprocessing and labels are in its `pretrained_cfg`, if any.

        `load_model` then adds what the user gave (labels, preprocessing, device) and the origin. Raise UsageError,
        CheckpointError, ModelError or DownloadError as it does; it reports an OSError in one line.
        """

    def load_to_check(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        """Return what `load` does, for `remtta doctor`, and also a model that adapts itself.

        Its `diagnose(images, wait)` then returns checks (bool) and measurements (float) by name.
        """
        return self.load(options, device, on_texts)

    def names_classes(self, options: ModelOptions) -> bool:
        """Return whether the classes are any names that --labels gives."""
        return False

    def weights_file(self, options: ModelOptions) -> Path | str | None:
        """Return the file of the weights; None if the loader finds it by the name."""
        return options.checkpoint

    def write_adapted(self, delta: Delta, options: ModelOptions, output: Path) -> str:
        """Write the model with a delta added as a file of its `suffixes`, atomically; return how, for the user."""
        raise UsageError(f"{options.name}: remtta cannot write adapted files of this format")

    def is_safe(self, option: str, value: object) -> bool:
        """Return whether a delta's header, which anyone may have written, may set one of its own options."""
        return False

    def own_options(self, options: ModelOptions) -> Any:
        """Return the values of its own options, in its dataclass."""
        assert self.options is not None
        return self.options(**options.own)

    def check(self, options: ModelOptions) -> None:
        """Raise UsageError if the options are not for this model, or a package is missing; before torch is loaded."""
        own = {field.name for field in _own_fields(self)}
        if others := {name: value for name, value in options.own.items() if name not in own and value is not None}:
            whose = dict.fromkeys(loader.names for loader in find_loaders().values() if _has_any(loader, others))
            raise UsageError(f"{_flags(others)}: only for {' or '.join(whose)}, and the model is {options.name}")
        unused = [name for name in OPTIONAL if name not in self.takes and getattr(options, name)]
        if unused := [name for name in unused if name != "checkpoint" or not is_model_file(str(options.checkpoint))]:
            raise UsageError(f"{options.name} is a whole model; leave {_flags(unused)} out")
        for package, extra in self.packages:
            check_installed(package, extra, options.name or "")


def _own_fields(loader: Loader) -> tuple[OptionField, ...]:
    return option_fields(loader.options) if loader.options else ()


def _has_any(loader: Loader, names: Mapping[str, object]) -> bool:
    return any(field.name in names for field in _own_fields(loader))


def _flags(names: Mapping[str, object] | list[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


@functools.cache
def find_loaders() -> Mapping[str, Loader]:
    """Return all loaders by name, in the order in which they are asked: timm's, which takes any name, last.

    Warn of a loader of another package that cannot be used.
    """
    from remtta.options.model import ModelOptions

    taken = {field.name for field in option_fields(ModelOptions)}
    found, reasons = usable("loaders", lambda extension: _created(extension, taken))
    for reason in reasons:
        _log.warning("%s", reason)
    any_name = found.pop(_ANY_NAME)
    return {**found, _ANY_NAME: any_name}


def _created(extension: Extension, taken: set[str]) -> Loader:
    kind = extension.load()
    if not (isinstance(kind, type) and issubclass(kind, Loader)):
        raise UsageError(f"{extension.target} of {extension.owner} is not a {Loader.__module__}.Loader; uninstall it")
    loader = kind()
    extension.take_names({field.name for field in _own_fields(loader)}, taken)
    return loader


def leave_out_loaders(options: Collection[str]) -> None:
    """Leave out loaders of other packages with one of these options, which a command has already; warn of them."""
    loaders: Any = find_loaders()
    for name in loaders.keys() - built_in("loaders").keys():
        if both := sorted(field.flag for field in _own_fields(loaders[name]) if {field.name, field.flag} & {*options}):
            _log.warning(
                "the loader %s has options that exist already: %s; uninstall its package", name, ", ".join(both)
            )
            del loaders[name]
    own_options.cache_clear()


def loader_of(options: ModelOptions) -> Loader:
    """Return the loader that takes a model."""
    return next(loader for loader in find_loaders().values() if loader.matches(options))


def is_model_file(name: str | Path) -> bool:
    """Return whether a name is that of a file that is a whole model, such as an ONNX file."""
    return any(str(name).lower().endswith(loader.suffixes) for loader in find_loaders().values() if loader.suffixes)


def is_safe(option: str, value: object) -> bool:
    """Return whether a delta's header, which anyone may have written, may set an option that only some loaders have."""
    return any(loader.is_safe(option, value) for loader in find_loaders().values())


def missing_loaders() -> str:
    """Return the end of an error on a name that no loader takes: which of remtta's are not installed, if any."""
    gone = [f"{name} (remtta.{part})" for name, part in missing("loaders").items()]
    return f"; not installed: the loaders {', '.join(gone)}" if gone else ""


@functools.cache
def own_options() -> type:
    """Return a dataclass of the options that loaders have of their own, for commands."""
    kinds = [loader.options for loader in find_loaders().values() if loader.options]
    return dataclass(frozen=True)(type("OwnOptions", tuple(kinds), {}))
