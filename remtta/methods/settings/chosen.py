"""The methods that a command requests, and their settings: from options to configs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from remtta.errors import UsageError
from remtta.lab.evaluation.method_names import check_method_names, defaults_of, label_of, method_of
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import METHOD_SUMMARIES, METHOD_TABLE, check_method, method_config
from remtta.options.model import is_onnx
from remtta.options.option import PassedSettings, method_option, model_option, option_fields, read_pairs

STREAM_METHODS = {name: text for name, text in METHOD_SUMMARIES.items() if name != "supervised"}  # needs labels


def default_method(model: str | None) -> str:
    """Return the default method of a model of this name; an ONNX file has no gradients."""
    return "fast" if is_onnx(model or "") else "remtta"


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


_NONE = SharedSettings()


@dataclass(frozen=True)
class MethodOptions:
    """The method of a stream."""

    method: Annotated[
        str | None,
        method_option(
            f"{', '.join(STREAM_METHODS)}; remtta methods describes them.",
            default="remtta; for an ONNX file fast",
            complete=STREAM_METHODS,
            common=True,
            more="methods.md",
        ),
    ] = None
    shared: SharedSettings = _NONE
    pairs: Annotated[
        Sequence[str],
        method_option(
            "Any other setting of the method (repeatable).", flags=("--set",), metavar="KEY=VALUE", common=True
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.method in METHOD_TABLE.keys() - STREAM_METHODS.keys():
            raise UsageError(f"{self.method} needs labels, and a stream has none; use it in remtta eval")
        if self.method is not None and "+" in self.method:
            raise UsageError(
                f"{self.method}: suffixes are for remtta eval; use --guard rollback, --answer both or --smooth auto"
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
            if name not in setting_names(kind):
                raise UsageError(f"{method} has no {flag_of(name)}; remtta methods {method} lists its settings")
        pairs = read_pairs(self.pairs, "--set")
        if twice := self.shared.given.keys() & pairs:
            name = min(twice)
            raise UsageError(f"{flag_of(name)} and --set {name}=... are both given; leave one out")
        return method_config(method, {**self.shared.given, **pairs}, batch_size=batch_size)


@dataclass(frozen=True)
class MethodsOptions:
    """The methods of an evaluation."""

    methods: Annotated[
        tuple[str, ...] | None,
        method_option(
            f"Methods to compare, of {', '.join(METHOD_TABLE)}. tent@cifar has the papers' settings for CIFAR; "
            "rem+guard adds the guard, rem+both averages with the source model, rem+smooth smooths over ordered "
            "frames; LABEL=rem adds a row with its own settings (--set LABEL.KEY=VALUE).",
            metavar="A,B",
            default="source,remtta; for an ONNX file source,fast",
            complete=METHOD_SUMMARIES,
            common=True,
            more="methods.md",
        ),
    ] = None
    shared: SharedSettings = _NONE
    pairs: Annotated[
        Sequence[str],
        method_option(
            "Setting of one method or label, such as tent.lr=1e-4 (repeatable).",
            flags=("--set",),
            metavar="METHOD.KEY=VALUE",
            common=True,
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.methods is not None:
            check_method_names(self.methods)

    def configs(self, batch_size: int, model: str | None = None) -> dict[str, MethodConfig]:
        """Return a config per method: its defaults, overridden by the shared settings that it has and its own --set
        values; raise UsageError if a setting or a value is unknown, or no method has one of the shared settings. The
        model's name decides where no method is named.
        """
        own, configs = self._own_settings(self.methods or ("source", default_method(model))), {}
        used: set[str] = set()
        for name in own:
            known = setting_names(METHOD_TABLE[method_of(name)].config)
            applying = {key: value for key, value in self.shared.given.items() if key in known}
            used |= applying.keys()
            changes = {**defaults_of(name), **applying, **own[name]}
            configs[name] = method_config(method_of(name), changes, batch_size=batch_size)
        if unused := sorted(self.shared.given.keys() - used):
            raise UsageError(f"none of {', '.join(own)} has {', '.join(map(flag_of, unused))}")
        return configs

    def _own_settings(self, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the --set values of each method."""
        own: dict[str, dict[str, Any]] = {name: {} for name in methods}
        # Values given for a method apply to all its rows, unless overridden for a label.
        for text in sorted(self.pairs, key=lambda text: text.partition(".")[0] not in METHOD_TABLE):
            method, _, setting = text.partition(".")
            meant = [name for name in methods if method in (name, label_of(name), method_of(name))]
            if not meant:
                raise UsageError(f"--set {text}: write METHOD.KEY=VALUE with a method of --methods ({', '.join(own)})")
            for name in meant:
                own[name] |= read_pairs([setting], "--set")
        return own


def setting_names(kind: type[MethodConfig]) -> set[str]:
    """Return the names of the settings that a method uses."""
    return {each.name for each in fields(kind)} - set(kind.unused)


def flag_of(setting: str) -> str:
    """Return the option of a shared setting."""
    return next(member.flag for member in option_fields(REMConfig) if member.name == setting)
