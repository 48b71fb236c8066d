"""All methods by name, with their settings. Imports torch only on use, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args, get_origin

from remtta.errors import UsageError, check, unknown
from remtta.methods.settings.base import PUBLISHED, REMTTA, Preset
from remtta.methods.settings.base import MethodConfig as MethodConfig
from remtta.methods.settings.rem_config import REMConfig as REMConfig
from remtta.options.option import OptionField, check_number, option_fields
from remtta.plugins import METHODS, load_plugin, package_of, plugins, summary_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from remtta.methods.base import Method

_ADAMS = ("optimizer", "lr", "anchor")
_MAX_LR = 0.9  # an "auto" anchor of larger ones undoes every update
REACH = 0.1
"""Distance from the source that an "auto" anchor allows a norm's weight, usually about 1, under Adam."""

FULL_BATCH = 20
"""Batch size from which on `remtta` uses its full learning rate; below it, a proportional one."""


@dataclass(frozen=True)
class MethodSpec:
    """A method name, as used in every command and in Python."""

    location: str | EntryPoint  # its method: module and class in `remtta.methods`, or the entry point of a package
    summary: str  # a one-line description
    default_preset: Preset = PUBLISHED  # its preset; a method of another package has its own
    config_class: type[MethodConfig] | None = None  # the class of its settings, if it is known without loading torch

    @property
    def method(self) -> type[Method[MethodConfig]]:
        """The class of the method; importing it loads torch. Raise UsageError if another package's is no method."""
        if not isinstance(self.location, str):
            return _outside(self.location)
        module, _, name = self.location.rpartition(".")
        return getattr(import_module(f"remtta.methods.{module}"), name)

    @property
    def config(self) -> type[MethodConfig]:
        """The class of its settings."""
        return self.config_class or self.method.settings

    @property
    def preset(self) -> Preset:
        """Its default settings, guard action and answer."""
        return self.default_preset if isinstance(self.location, str) else self.method.preset


def _outside(entry: EntryPoint) -> type[Method[MethodConfig]]:
    """Return the method class of another package."""
    from remtta.methods.base import Method

    found = load_plugin(entry)
    owner = f"{entry.value} of the package {package_of(entry)}"
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UsageError(f"{owner} is not a method: not a subclass of remtta.methods.base.Method")
    if not (hasattr(found, "loss") or found.predicts_after_update or found.predict is not Method.predict):
        raise UsageError(f"{owner} defines no loss(images, center)")
    if "__dataclass_params__" not in vars(found.settings):
        raise UsageError(f"{owner} has settings without @dataclass(frozen=True): {found.settings.__name__}")
    if not isinstance(found.preset, Preset):
        raise UsageError(f"{owner} has a preset that is no remtta.methods.settings.base.Preset: {found.preset!r}")
    return found


_DEFAULT = replace(
    REMTTA,
    settings={
        **REMTTA.settings,
        "adapt_layers": "all",
        "mask_ratios": (0.0, 0.2),
        "ranking_weight": 2.0,
        "margin": 1.0,
    },
)
_ONE_MASK = Preset({"mask_ratios": (0.0, 0.1)})  # the paper's N = 1

_BUILT_IN: dict[str, MethodSpec] = {
    "remtta": MethodSpec(
        "ensemble_rem.EnsembleREM",
        "the default: REM on the ensemble with the source model, with centred logits, a higher rate and an anchor",
        _DEFAULT,
        REMConfig,
    ),
    "light": MethodSpec(
        "ensemble_rem.EnsembleREM",
        "deprecated: remtta --adapt-every 2",
        replace(_DEFAULT, settings={**_DEFAULT.settings, "adapt_every": 2}),
        REMConfig,
    ),
    "fast": MethodSpec(
        "source.CentredSource",
        "centre, with recent statistics in batch norms: no training, one forward pass (two with batch norms)",
        Preset({"bn": "recent"}, answer="both"),
    ),
    "source": MethodSpec("source.Source", "no adaptation: the baseline"),
    "centre": MethodSpec(
        "source.CentredSource", "remove the offset common to all logits: one forward pass, no training"
    ),
    "neo": MethodSpec(
        "neo.NEO", "subtract the mean feature before the classifier; no training (Murphy et al., ICLR 2026)"
    ),
    "norm": MethodSpec(
        "source.NORM", "batch norms use the batch's statistics; no training (Schneider et al., NeurIPS 2020)"
    ),
    "pseudo-label": MethodSpec(
        "pseudo_label.PseudoLabel", "train on the model's own confident predictions (Lee, 2013)"
    ),
    "tent": MethodSpec("tent.Tent", "minimise the entropy of predictions (Wang et al., ICLR 2021)"),
    "tent-come": MethodSpec(
        "come.TentCOME", "Tent with an entropy that includes uncertainty (COME, Zhang et al., ICLR 2025)"
    ),
    "eta": MethodSpec("eata.ETA", "minimise the entropy of confident, diverse images (Niu et al., ICML 2022)"),
    "eata": MethodSpec("eata.EATA", "ETA with a Fisher penalty, needs clean images (Niu et al., ICML 2022)"),
    "eata-come": MethodSpec("come.EATACOME", "EATA with COME's entropy"),
    "rdumb": MethodSpec("eata.RDumb", "ETA with periodic resets (Press et al., NeurIPS 2023)"),
    "sar": MethodSpec("sar.SAR", "sharpness-aware entropy minimisation on confident images (Niu et al., ICLR 2023)"),
    "sar-come": MethodSpec("come.SARCOME", "SAR with COME's entropy"),
    "deyo": MethodSpec("deyo.DeYO", "minimise the entropy of images recognised by shape (Lee et al., ICLR 2024)"),
    "zerosiam": MethodSpec(
        "zerosiam.ZeroSiam", "entropy behind a predictor, aligned with the prediction (Chen et al., ICLR 2026)"
    ),
    "spa": MethodSpec("spa.SPA", "views without low frequencies or with noise (Niu et al., ICML 2025)"),
    "roid": MethodSpec("roid.ROID", "weighted likelihood ratio, source weights mixed in (Marsden et al., WACV 2024)"),
    "cmf": MethodSpec("roid.CMF", "ROID with a Kalman filter over the weights (Lee and Chang, ICLR 2024)"),
    "rem": MethodSpec(
        "rem.REM", "masked views: consistency and entropy ranking (Han et al., ICML 2025)", PUBLISHED, REMConfig
    ),
    "rem-n1": MethodSpec("rem.REM", "REM with one masked view, in three quarters of the time", _ONE_MASK, REMConfig),
    "rem-come": MethodSpec("come.REMCOME", "REM with COME's entropy in the ranking", PUBLISHED, REMConfig),
    "supervised": MethodSpec(
        "pseudo_label.Supervised", "train on the true labels: an upper bound, in remtta eval only"
    ),
    "cotta": MethodSpec("cotta.CoTTA", "mean teacher, random restoration of weights (Wang et al., CVPR 2022)"),
    "rotta": MethodSpec("rotta.RoTTA", "a balanced memory of the stream, mean teacher (Yuan et al., CVPR 2023)"),
    "lame": MethodSpec(
        "lame.LAME", "adjust predictions to similar images of the batch; no training (Boudiaf et al., CVPR 2022)"
    ),
    "memo": MethodSpec("memo.MEMO", "adapt to augmented views of each image, then reset (Zhang et al., NeurIPS 2022)"),
    "foa": MethodSpec("foa.FOA", "search prompts with forward passes only, needs clean images (Niu et al., ICML 2024)"),
    "vida": MethodSpec("vida.ViDA", "low- and high-rank adapters, mean teacher (Liu et al., ICLR 2024)"),
    "continual-mae": MethodSpec(
        "continual_mae.ContinualMAE", "mask uncertain patches: consistency and reconstruction (Liu et al., CVPR 2024)"
    ),
    "petal": MethodSpec(
        "cotta.PETAL", "CoTTA with the source posterior, needs clean images (Brahma and Rai, CVPR 2023)"
    ),
    "vdp": MethodSpec("vdp.VDP", "pixel prompts, mean teacher (Gan et al., AAAI 2023)"),
    "ecotta": MethodSpec(
        "ecotta.EcoTTA", "meta networks beside a frozen model, needs clean images (Song et al., CVPR 2023)"
    ),
    "becotta": MethodSpec("becotta.BECoTTA", "low-rank experts per domain, needs clean images (Lee et al., ICML 2024)"),
    "watt": MethodSpec(
        "watt.WATT", "zero-shot: adapt per template, average the weights (Osowiechi et al., NeurIPS 2024)"
    ),
    "rem-watt": MethodSpec("watt.REMWATT", "zero-shot: WATT with REM's loss"),
    "clipartt": MethodSpec(
        "watt.CLIPArTT", "zero-shot: train towards sentences of likely classes (Vargas Hakim et al., WACV 2025)"
    ),
    "tpt": MethodSpec("tpt.TPT", "zero-shot: tune the prompt on views of each image (Shu et al., NeurIPS 2022)"),
}
"""The methods of this project, and the published ones as published."""


def find_methods(known: Collection[str]) -> tuple[dict[str, MethodSpec], dict[str, str]]:
    """Return the methods of other packages by name, and the names that are refused, with the reason."""
    found: dict[str, MethodSpec] = {}
    refused: dict[str, str] = {}
    owners = dict.fromkeys(known, "remtta itself")
    for entry in plugins(METHODS):
        name, owner = entry.name, f"the package {package_of(entry)}"
        if name in owners:
            refused[name] = f"{owners[name]} and {owner} both have a method {name}; uninstall {package_of(entry)}"
        elif not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            refused[name] = f"{owner} has a method {name}, whose name may only have letters, digits, - and _"
        else:
            found[name], owners[name] = MethodSpec(entry, summary_of(entry)), owner
    return found, refused


_FOUND, REFUSED = find_methods(_BUILT_IN)

METHOD_TABLE: dict[str, MethodSpec] = {**_BUILT_IN, **_FOUND}
"""All methods by name, also those of other packages."""

ZERO_SHOT = ("watt", "rem-watt", "clipartt", "tpt")
"""Methods that accept only zero-shot models."""

METHOD_SUMMARIES: dict[str, str] = {name: named.summary for name, named in METHOD_TABLE.items()}
"""A one-line description of every method, by its name on the command line."""

_DEPRECATED = {"light": "remtta with adapt_every=2 (--adapt-every 2)"}
"""Old names of methods, and what to use instead."""

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
    config_class, preset = METHOD_TABLE[name].config, METHOD_TABLE[name].preset.settings
    known = [field.name for field in dataclasses.fields(config_class)]
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
