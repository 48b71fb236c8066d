"""All methods by name, with their settings. Imports torch only on use, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from remtta.errors import UsageError, check
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig, REMN1Config
from remtta.options import Action, Answer
from remtta.options.option import Member, members_of
from remtta.plugins import METHODS, load_plugin, package_of, plugins, summary_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from remtta.methods.objective import Objective

__all__ = [
    "ALGORITHMS",
    "FULL_BATCH",
    "METHOD_SUMMARIES",
    "METHOD_TABLE",
    "ZERO_SHOT",
    "MethodConfig",
    "Named",
    "REMConfig",
    "algorithm_of",
    "check_method",
    "method_config",
]

_ADAMS = ("optimizer", "lr", "anchor")
_MAX_ANCHOR = 0.9999  # limit of "auto", for large rates
REACH = 0.1
"""How far an "auto" anchor lets Adam move a norm's weight from the source's, which is usually about 1."""

FULL_BATCH = 20
"""Batch size from which on `remtta` uses its full learning rate; below it, the rate is proportional to the
batch size.
"""


@dataclass(frozen=True)
class Named:
    """A method name, as used in every command and in Python.

    Attributes:
        place: Its objective: the module in `remtta.methods` and the class in it, or the entry point of a package.
        summary: A one-line description.
        algorithm: Name of the published method that it runs; its own name if None.
        settings: Settings that override the published ones; those specific to Adam are dropped with another optimizer.
        action: Default action of its guard.
        answer: Which model predicts.
        kind: The class of its settings, if it is known without loading torch.
    """

    place: str | EntryPoint
    summary: str
    algorithm: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    action: Action = "off"
    answer: Answer = "adapted"
    kind: type[MethodConfig] | None = None

    @property
    def objective(self) -> type[Objective[Any]]:
        """The class of the method; importing it loads torch.

        Raises:
            UsageError: If it belongs to another package and cannot be imported, or is not a method.
        """
        if not isinstance(self.place, str):
            return _outside(self.place)
        module, _, kind = self.place.rpartition(".")
        return getattr(import_module(f"remtta.methods.{module}"), kind)

    @property
    def config(self) -> type[MethodConfig]:
        """The class of its settings."""
        return self.kind or self.objective.settings


def _outside(entry: EntryPoint) -> type[Objective[Any]]:
    """Return the method class of another package."""
    from remtta.methods.objective import Objective

    found = load_plugin(entry)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise UsageError(
            f"{entry.value} of the package {package_of(entry)} is not a method: not a subclass of "
            "remtta.methods.objective.Objective"
        )
    return found


METHOD_TABLE: dict[str, Named] = {
    "remtta": Named(
        "rem.RankedEntropy",
        "the default: REM on centred logits at ten times the rate, held near the source, which answers for half",
        "rem",
        {"optimizer": "adam", "lr": 0.01, "anchor": "auto", "centre": True},  # measured in docs/results.md
        "rollback",
        "both",
        REMConfig,
    ),
    "fast": Named("source.CentredSource", "centre: what one forward pass and no training gain", "centre"),
    "source": Named("source.Source", "no adaptation, the baseline"),
    "centre": Named("source.CentredSource", "centred logits alone: one forward pass, nothing is trained"),
    "norm": Named("norm.NORM", "batch norms take the batch's statistics, no training (Schneider et al., NeurIPS 2020)"),
    "pseudo-label": Named("pseudo_label.PseudoLabel", "train on its own confident predictions (Lee, 2013)"),
    "tent": Named("tent.Tent", "lower the entropy of predictions (Wang et al., ICLR 2021)"),
    "tent-come": Named("come.TentCOME", "Tent on an entropy that knows doubt (COME, Zhang et al., ICLR 2025)"),
    "eta": Named("eta.ETA", "entropy of certain, varied images (Niu et al., ICML 2022)"),
    "eata": Named("eata.EATA", "ETA that keeps what matters on source images (Niu et al., ICML 2022)"),
    "eata-come": Named("come.EATACOME", "EATA on COME's entropy"),
    "rdumb": Named("rdumb.RDumb", "ETA that starts again now and then (Press et al., NeurIPS 2023)"),
    "sar": Named("sar.SAR", "entropy of certain images, towards flat minima (Niu et al., ICLR 2023)"),
    "sar-come": Named("come.SARCOME", "SAR on COME's entropy"),
    "deyo": Named("deyo.DeYO", "entropy of certain images known by shape (Lee et al., ICLR 2024)"),
    "roid": Named("roid.ROID", "weighted likelihood ratio, source mixed in (Marsden et al., WACV 2024)"),
    "cmf": Named("cmf.CMF", "ROID with Kalman-filtered weights (Lee and Chang, ICLR 2024)"),
    "rem": Named("rem.RankedEntropy", "masked views agree and rank by entropy (Han et al., ICML 2025)", kind=REMConfig),
    "rem-n1": Named("rem.OneMaskedView", "REM with one masked view, for two thirds of the time", kind=REMN1Config),
    "rem-come": Named("come.REMCOME", "REM ranking by COME's entropy", kind=REMConfig),
    "supervised": Named("supervised.Supervised", "train on the true labels: an upper bound, for remtta eval"),
    "cotta": Named("cotta.CoTTA", "learn from an averaged teacher, restore at random (Wang et al., CVPR 2022)"),
    "lame": Named("lame.LAME", "correct predictions by their neighbours, no training (Boudiaf et al., CVPR 2022)"),
    "memo": Named("memo.MEMO", "adapt to each image's augmented views, then forget it (Zhang et al., NeurIPS 2022)"),
    "foa": Named("foa.FOA", "search prompts by forward passes only, needs clean images (Niu et al., ICML 2024)"),
    "vida": Named("vida.ViDA", "low- and high-rank adapters learn from an averaged teacher (Liu et al., ICLR 2024)"),
    "continual-mae": Named(
        "continual_mae.ContinualMAE",
        "mask uncertain patches, agree and reconstruct (Liu et al., CVPR 2024)",
    ),
    "petal": Named("petal.PETAL", "CoTTA near the source's posterior, needs clean images (Brahma and Rai, CVPR 2023)"),
    "vdp": Named("vdp.VDP", "pixel prompts learn from an averaged teacher (Gan et al., AAAI 2023)"),
    "ecotta": Named("ecotta.EcoTTA", "meta networks near a frozen model, needs clean images (Song et al., CVPR 2023)"),
    "becotta": Named("becotta.BECoTTA", "low-rank experts by domain, needs clean images (Lee et al., ICML 2024)"),
    "watt": Named("watt.WATT", "zero-shot: average weights over templates (Osowiechi et al., NeurIPS 2024)"),
    "rem-watt": Named("watt.REMWATT", "zero-shot: REM's loss in WATT's loop"),
    "clipartt": Named(
        "clipartt.CLIPArTT",
        "zero-shot: sentences of each image's likeliest classes (Vargas Hakim et al., WACV 2025)",
    ),
    "tpt": Named("tpt.TPT", "zero-shot: tune the prompt to each image's views (Shu et al., NeurIPS 2022)"),
}
"""All methods by name: those of this project, the published ones as published, and those of other packages."""


def find_methods(known: Collection[str]) -> tuple[dict[str, Named], dict[str, str]]:
    """Return the methods of other packages by name, and the names that are refused, with the reason."""
    found: dict[str, Named] = {}
    refused: dict[str, str] = {}
    owners = dict.fromkeys(known, "remtta itself")
    for entry in plugins(METHODS):
        name, owner = entry.name, f"the package {package_of(entry)}"
        if name in owners:
            refused[name] = f"{owners[name]} and {owner} both have a method {name}; uninstall {package_of(entry)}"
        elif not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            refused[name] = f"{owner} has a method {name}, whose name may only have letters, digits, - and _"
        else:
            found[name], owners[name] = Named(entry, summary_of(entry)), owner
    return found, refused


_found, REFUSED = find_methods(METHOD_TABLE)
METHOD_TABLE |= _found

ZERO_SHOT = ("watt", "rem-watt", "clipartt", "tpt")
"""Methods that accept only zero-shot models."""

ALGORITHMS = tuple(name for name, named in METHOD_TABLE.items() if named.algorithm is None)
"""Names of the published methods."""

METHOD_SUMMARIES: dict[str, str] = {name: named.summary for name, named in METHOD_TABLE.items()}
"""A one-line description of every method, by its name on the command line."""


def algorithm_of(name: str) -> str:
    """Return the name of the published method that a name runs: `rem` for `remtta`."""
    named = METHOD_TABLE.get(name)
    return named.algorithm or name if named else name


def check_method(name: str, known: Collection[str]) -> None:
    """Raise if a method is unknown, or if two packages have it.

    Raises:
        UsageError: With a suggestion and all known names, or with the packages.
    """
    if name in REFUSED:
        raise UsageError(REFUSED[name])
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"did you mean {close[0]}? There are" if close else "choose"
        raise UsageError(f'unknown method "{name}"; {meant} {", ".join(known)}')


def method_config(name: str, settings: Mapping[str, Any], *, batch_size: int) -> MethodConfig:
    """Return a method's config: its defaults, overridden by these settings by field name.

    "auto" for the anchor means the value that suits Adam's rate; some methods' default learning rates grow with the
    batch size.

    Raises:
        UsageError: If the method or a setting is unknown, or a value is out of range.
    """
    check_method(name, METHOD_TABLE)
    kind, own = METHOD_TABLE[name].config, METHOD_TABLE[name].settings
    known = [field.name for field in dataclasses.fields(kind)]
    for setting in settings:
        check(setting in known, f"a setting of {name}", setting, f"one of {', '.join(known)}")
    if settings.get("optimizer") not in (None, own.get("optimizer")):
        own = {setting: value for setting, value in own.items() if setting not in _ADAMS}
    if "lr" in own:
        own = {**own, "lr": own["lr"] * min(1.0, batch_size / FULL_BATCH)}
    settings = {**own, **settings}
    if settings.get("optimizer") == "adam" or settings.get("momentum") == 0:
        settings = {"nesterov": False, **settings}  # the method's default may require it for SGD
    if "lr" not in settings:
        settings = {**settings, "lr": kind.lr_at(batch_size)}
    if settings.get("anchor") == "auto":
        settings = {**settings, "anchor": _anchor_for(name, settings["lr"], settings.get("optimizer", kind.optimizer))}
    members = {member.name: member for member in members_of(kind)}
    settings = {key: _of_type(members[key], f"{name}'s {key}", value) for key, value in settings.items()}
    try:
        return kind(**settings)
    except UsageError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # e.g. text instead of a number
        raise UsageError(f"a setting of {name} has a value of the wrong kind: {error}") from error


def _anchor_for(name: str, lr: Any, optimizer: Any) -> float:
    """Return the anchor that limits the distance from the source weights for any rate: 1 - exp(-lr / reach).

    Adam moves a weight by at most about its rate per step, so that steps and anchor balance at a distance of at most
    `REACH`.
    """
    check(optimizer == "adam", f"{name}'s anchor", "auto", "a number such as 0.01 where the optimizer is not adam")
    check(isinstance(lr, (int, float)) and not isinstance(lr, bool), f"{name}'s lr", lr, "a number")
    share = 1 - math.exp(-lr / REACH)
    return min(share, _MAX_ANCHOR)


def _of_type(member: Member, name: str, value: Any) -> Any:
    """Convert the value of a setting, which may be given as text, to the setting's type.

    Raises:
        UsageError: If it is of another type.
    """
    wanted, or_none = member.type, " or None" if member.optional else ""
    if value is None and or_none:
        return None
    if wanted is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        check(isinstance(value, bool), name, value, "true or false")
    elif wanted in (int, float):
        number = isinstance(value, int if wanted is int else (int, float)) and not isinstance(value, bool)
        check(number, name, value, ("a whole number" if wanted is int else "a number") + or_none)
    elif wanted is str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, (tuple, list)):  # parsed by Python from "0,2"
            return ",".join(map(str, value))
        check(isinstance(value, str), name, value, "text" + or_none)
    return value
