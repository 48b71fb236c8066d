"""The methods that a command requests, and their settings: from options to configs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from remtta.errors import UsageError
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import METHOD_SUMMARIES, METHOD_TABLE, check_method, method_config
from remtta.options.model import ModelOptions
from remtta.options.option import PassedSettings, method_option, model_option, option_fields, read_pairs

STREAM_METHODS = {name: spec.summary for name, spec in METHOD_TABLE.items() if not spec.needs_labels}
set_option = partial(method_option, flags=("--set",), common=True)
_LISTED = {name: text for name, text in STREAM_METHODS.items() if name in METHOD_SUMMARIES}


def default_method(model: str | None) -> str:
    """Return the default method of a model of this name, which its loader decides: an ONNX file has no gradients."""
    return ModelOptions(model).loader.default_method


@dataclass(frozen=True)
class SharedSettings:
    """Settings shared by many methods, the starting delta, and source images."""

    delta: Annotated[
        Path | None,
        model_option(
            "Start from the delta of an earlier run, with its model, checkpoint and preprocessing.",
            metavar="FILE",
            common=True,
        ),
    ] = None
    given: Annotated[Mapping[str, object], PassedSettings(REMConfig)] = field(default_factory=dict)
    """Settings by field of the configs."""
    source_data: Annotated[
        Path | None,
        method_option(
            "Clean unlabelled images of the source domain, for methods that need them first; or statistics "
            "(.safetensors) that an earlier run computed.",
            metavar="FOLDER",
            more="methods.md#source-images",
        ),
    ] = None


@dataclass(frozen=True)
class MethodOptions:
    """The method of a stream."""

    method: Annotated[
        str | None,
        method_option(
            f"{', '.join(_LISTED)}; remtta methods describes them.",
            default="remtta; fast for a model without gradients",
            complete=_LISTED,
            common=True,
            more="methods.md",
        ),
    ] = None
    shared: SharedSettings = field(default_factory=SharedSettings)
    pairs: Annotated[
        Sequence[str], set_option("Any other setting of the method (repeatable).", metavar="KEY=VALUE")
    ] = ()

    def __post_init__(self) -> None:
        if self.method in METHOD_TABLE.keys() - STREAM_METHODS.keys():
            raise UsageError(f"{self.method} needs labels, and a stream has none; choose another method")
        if self.method is not None and "+" in self.method:
            raise UsageError(
                f"{self.method}: no suffix belongs to --method; use --guard rollback, --answer both or --smooth auto"
            )
        if self.method is not None:
            check_method(self.method, STREAM_METHODS)

    def config(self, batch_size: int, model: str | None = None) -> MethodConfig:
        """Return the method's config: its defaults, overridden by shared options and --set; raise UsageError if it has
        no such setting, or a value is out of range. The model's name decides where no method is named.
        """
        method = self.method or default_method(model)
        kind = METHOD_TABLE[method].config
        for name in self.shared.given:
            if name not in kind.setting_names():
                raise UsageError(f"{method} has no {flag_of(name)}; remtta methods {method} lists its settings")
        pairs = read_pairs(self.pairs, "--set")
        if twice := self.shared.given.keys() & pairs:
            name = min(twice)
            raise UsageError(f"{flag_of(name)} and --set {name}=... are both given; leave one out")
        return method_config(method, {**self.shared.given, **pairs}, batch_size=batch_size)


def flag_of(setting: str) -> str:
    """Return the option of a shared setting."""
    return next(member.flag for member in option_fields(REMConfig) if member.name == setting)
