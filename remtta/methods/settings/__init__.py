"""Every method by its name, and its settings. Imports no torch until one is asked for: `--help` is fast."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from remtta.errors import UsageError, check
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem import REMConfig, REMN1Config
from remtta.options import Action, Answer
from remtta.options.option import Member, members_of
from remtta.plugins import METHODS, load_plugin, package_of, plugins, summary_of

if TYPE_CHECKING:
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
_MOST_ANCHOR = 0.9999  # of "auto", at rates at which nothing is left of a step
REACH = 0.1
"""How far an anchor of "auto" lets Adam carry a weight of a norm, most of which are about 1."""

FULL_BATCH = 20
"""Frames in a batch from which on the whole learning rate of `remtta` is used; below, less in proportion."""


@dataclass(frozen=True)
class Named:
    """What a method's name stands for, in every command and in Python.

    Attributes:
        place: Its objective: the module in `remtta.methods`, and the class there; or the entry point of a package.
        summary: A line about it.
        algorithm: Name of the published method that runs; its own name if None.
        settings: Settings in place of the published ones; another optimizer leaves out those that are for Adam.
        action: What its guard does.
        answer: Who answers.
        kind: Kind of its settings, where torch need not be loaded to know it.
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
        """What runs, which loads torch.

        Raises:
            UsageError: If it is of another package, and cannot be imported or is none.
        """
        if isinstance(self.place, EntryPoint):
            return _outside(self.place)
        module, _, kind = self.place.rpartition(".")
        found: type[Objective[Any]] = getattr(import_module(f"remtta.methods.{module}"), kind)
        return found

    @property
    def config(self) -> type[MethodConfig]:
        """Kind of its settings."""
        return self.kind or self.objective.settings


def _outside(entry: EntryPoint) -> type[Objective[Any]]:
    """The objective of another package."""
    from remtta.methods.objective import Objective

    found = load_plugin(entry)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise UsageError(
            f"{entry.value} of the package {package_of(entry)} is no method: no subclass of "
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
"""Every method by its name: two of this project's choosing, the published ones to the letter, and other packages'."""


def find_methods(known: Collection[str]) -> tuple[dict[str, Named], dict[str, str]]:
    """Methods of other packages beside those known, by name; and names that cannot be had, with the reason."""
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
"""Methods that only zero-shot models take."""

ALGORITHMS = tuple(name for name, named in METHOD_TABLE.items() if named.algorithm is None)
"""Names of the published methods."""

METHOD_SUMMARIES: dict[str, str] = {name: named.summary for name, named in METHOD_TABLE.items()}
"""A line about every method, by its name on the command line."""


def algorithm_of(name: str) -> str:
    """Name of the published method that runs under a name: `rem` for `remtta`."""
    named = METHOD_TABLE.get(name)
    return named.algorithm or name if named else name


def check_method(name: str, known: Collection[str]) -> None:
    """Refuse a method that there is not, or that two packages have.

    Raises:
        UsageError: Naming the one that may have been meant, and all; or the packages.
    """
    if name in REFUSED:
        raise UsageError(REFUSED[name])
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"did you mean {close[0]}? There are" if close else "choose"
        raise UsageError(f'unknown method "{name}"; {meant} {", ".join(known)}')


def method_config(name: str, settings: Mapping[str, Any], *, batch_size: int) -> MethodConfig:
    """A method's config: its defaults with these settings, by field name, in place of some.

    "auto" for the anchor is the one that goes with Adam's rate; some methods' learning rates grow with the batch size.

    Raises:
        UsageError: If there is no such method, it has no such setting, or a value is out of range.
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
        settings = {"nesterov": False, **settings}  # which a method's default may ask of SGD
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
    except (TypeError, ValueError, OverflowError) as error:  # such as text where a number belongs
        raise UsageError(f"a setting of {name} has a value of the wrong kind: {error}") from error


def _anchor_for(name: str, lr: Any, optimizer: Any) -> float:
    """The share that keeps weights near the source's at any rate: 1 - exp(-lr / reach).

    Adam moves a weight by at most about its rate at each step, so that steps
    and pull are in balance within the reach of it.
    """
    check(optimizer == "adam", f"{name}'s anchor", "auto", "a number such as 0.01 where the optimizer is not adam")
    check(isinstance(lr, (int, float)) and not isinstance(lr, bool), f"{name}'s lr", lr, "a number")
    share = 1 - math.exp(-lr / REACH)
    return min(share, _MOST_ANCHOR)


def _of_type(member: Member, name: str, value: Any) -> Any:
    """The value of a setting, which may have come as text, as its type has it.

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
        if isinstance(value, (tuple, list)):  # what Python reads in "0,2"
            return ",".join(map(str, value))
        check(isinstance(value, str), name, value, "text" + or_none)
    return value
