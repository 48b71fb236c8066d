"""All methods by name, with their settings. Imports torch only on use, so that `--help` is fast."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any, cast, get_args, get_origin

from remtta.errors import UsageError, check, unknown
from remtta.extensions import built_in, of_packages
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.core import MethodSpec
from remtta.methods.settings.renamed import METHODS, current_settings
from remtta.options.option import OptionField, check_number, option_fields, plain_number

_ADAMS = ("optimizer", "lr", "anchor")
_MAX_LR = 0.9  # an "auto" anchor of larger ones undoes every update
REACH = 0.1
"""Distance from the source that an "auto" anchor allows a norm's weight under Adam; these weights are about 1."""

FULL_BATCH = 20
"""Batch size from which on `remtta` uses its full learning rate; below it, a proportional one."""


def _built_in_methods() -> dict[str, MethodSpec]:
    """Return the methods of remtta's parts, whose extensions are tables of them."""
    tables = [extension.load() for extension in built_in("methods").values()]
    return {name: spec for table in tables for name, spec in cast(dict[str, MethodSpec], table).items()}


def find_methods(known: Collection[str]) -> tuple[dict[str, MethodSpec], dict[str, str]]:
    """Return the methods of other packages by name, and the names that are refused, with the reason."""
    found, refused = of_packages("methods", known)
    return {name: MethodSpec(extension, extension.summary) for name, extension in found.items()}, refused


_BUILT_IN = _built_in_methods()
_FOUND, REFUSED = find_methods(_BUILT_IN)

METHOD_TABLE: dict[str, MethodSpec] = {**_BUILT_IN, **_FOUND}
"""All methods by name, also those of other packages."""

_DEPRECATED = {"light": "remtta with adapt_every=2 (--adapt-every 2)", **METHODS}
"""Old names of methods, and what to use instead."""

METHOD_SUMMARIES = {name: spec.summary for name, spec in METHOD_TABLE.items() if name not in _DEPRECATED}
"""A one-line description of every method, by its name on the command line, without deprecated names."""

_log = logging.getLogger(__name__)


def check_method(name: str, known: Collection[str]) -> None:
    """Raise UsageError if a method is unknown, with all known names, or if two packages have it."""
    if name in REFUSED:
        raise UsageError(REFUSED[name])
    if name not in known:
        raise unknown("method", name, known)
    if name in _DEPRECATED:
        _warn_of_deprecated(name)


@functools.cache  # once per process
def _warn_of_deprecated(name: str) -> None:
    _log.warning("the method %s is deprecated: use %s", name, _DEPRECATED[name])


def method_config(name: str, settings: Mapping[str, Any], *, batch_size: int) -> MethodConfig:
    """Return a method's config: its defaults, overridden by these settings by field name.

    "auto" for the anchor means the value that suits Adam's rate; some methods' default learning rates grow with the
    batch size. Raise UsageError if the method or a setting is unknown, or a value is out of range.
    """
    check_method(name, METHOD_TABLE)
    config_class = METHOD_TABLE[name].config
    settings = {key: plain_number(value) for key, value in current_settings(settings).items()}
    preset: Mapping[str, Any] = current_settings(METHOD_TABLE[name].preset.settings)
    known = config_class.setting_names()
    for setting in (*settings, *preset):
        if setting not in known:
            raise unknown(f"setting of {name}", setting, known)
    if settings.get("optimizer") not in (None, preset.get("optimizer", config_class.optimizer)):
        preset = {setting: value for setting, value in preset.items() if setting not in _ADAMS}
    if "lr" in preset:
        preset = {**preset, "lr": preset["lr"] * min(1.0, batch_size / FULL_BATCH)}
    settings = {"lr": config_class.lr_at(batch_size), **preset, **settings}
    optimizer = settings.get("optimizer", config_class.optimizer)
    if settings.get("optimizer") == "adam" or settings.get("momentum") == 0:
        settings = {"nesterov": False, **settings}  # the method's default may require it for SGD
    if settings.get("anchor") == "auto":
        settings = {**settings, "anchor": _anchor_for(name, settings["lr"], optimizer)}
    members = {member.name: member for member in option_fields(config_class)}
    settings = {key: _of_type(members[key], f"{name}'s {key}", value) for key, value in settings.items()}
    try:
        return config_class(**settings)
    except UsageError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # e.g. text instead of a number
        raise UsageError(f"a setting of {name} has a value of the wrong type: {error}") from error


def settings_of(name: str, config: MethodConfig | Mapping[str, Any] | None, *, batch_size: int) -> MethodConfig:
    """Return a method's config: the given one, or its defaults overridden by the given settings; raise UsageError if
    the config is another method's, or as `method_config` does.
    """
    if not isinstance(config, MethodConfig):
        return method_config(name, config or {}, batch_size=batch_size)
    config_class = METHOD_TABLE[name].config
    if not isinstance(config, config_class):
        raise UsageError(f"{name} takes its settings as a {config_class.__name__}, got a {type(config).__name__}")
    return config


def _anchor_for(name: str, lr: Any, optimizer: Any) -> float:
    """Return the anchor that limits the distance from the source weights for any rate: 1 - exp(-lr / reach).

    Adam moves a weight by at most about its rate per step, so that steps and anchor balance at a distance of at most
    `REACH`.
    """
    check(optimizer == "adam", f"{name}'s anchor", "auto", "a number such as 0.01 where the optimizer is not adam")
    is_number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    check(is_number and 0 < lr <= sys.float_info.max, f"{name}'s lr", lr, "a finite number above 0")
    check(lr <= _MAX_LR, f"{name}'s lr", lr, f"at most {_MAX_LR} with anchor auto, which would undo every update")
    return 1 - math.exp(-lr / REACH)


def _of_type(member: OptionField, name: str, value: Any) -> Any:
    """Convert a setting's value, which may be text, to the setting's type; raise UsageError if it is of another."""
    wanted, or_none = member.type, " or None" if member.optional else ""
    if value is None and or_none:
        return None
    if wanted is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        check(isinstance(value, bool), name, value, "true or false")
    elif wanted in (int, float):
        check_number(member, name, value)
    elif wanted is str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, (tuple, list)):  # parsed by Python from "0,2"
            return ",".join(map(str, value))
        check(isinstance(value, str), name, value, "text" + or_none)
    elif get_origin(wanted) is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (tuple, list)) else [value]
        try:
            return tuple(map(get_args(wanted)[0], parts))
        except (TypeError, ValueError, OverflowError):
            check(False, name, value, "numbers separated by commas" + or_none)
    return value
