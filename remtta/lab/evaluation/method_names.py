"""Names of methods in an evaluation: `[LABEL=]METHOD[@cifar][+guard][+both][+smooth]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from remtta.errors import UsageError, unknown
from remtta.methods.table import METHOD_TABLE, check_method
from remtta.options import Action, Answer

_ADAM: Mapping[str, object] = {"optimizer": "adam", "lr": 1e-3}
CIFAR: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("tent", "tent-come", "eta", "rdumb", "sar", "sar-come", "deyo", "roid", "cmf"), _ADAM),
    "eata": {**_ADAM, "fisher_weight": 1.0},
    "eata-come": {**_ADAM, "fisher_weight": 1.0},
    "cotta": {**_ADAM, "restore": 0.01},
    "petal": {**_ADAM, "restore": 0.03, "posterior_weight": 1e-9},
    "vida": {"optimizer": "adam", "lr": 1e-4, "adapter_lr": 1e-5, "adapter_decay": 0.999, "threshold": 0.05},
    "memo": {"optimizer": "sgd", "momentum": 0.0, "lr": 5e-3, "num_augmentations": 32},
}
"""Settings of METHOD@cifar: the official codes' of Tent, CoTTA, PETAL, ViDA and MEMO, for others those of ROID's
benchmark; all for batches of 200 but MEMO's.
"""

_GUARDED, _BOTH, _SMOOTH = _ADDITIONS = ("guard", "both", "smooth")


def _added(name: str) -> list[str]:
    """Return the additions to the method's name."""
    return name.rpartition("=")[2].split("+")[1:]


def method_of(name: str) -> str:
    """Return the method of an evaluation's name: `tent` for `high=tent@cifar+guard`."""
    return re.split("[@+]", name.rpartition("=")[2])[0]


def defaults_of(name: str) -> Mapping[str, object]:
    """Return the settings that the name stands for, if it ends in @cifar."""
    return CIFAR[method_of(name)] if "@" in name else {}


def is_guarded(name: str) -> bool:
    """Return whether the method is guarded."""
    return _GUARDED in _added(name) or METHOD_TABLE[method_of(name)].preset.action != "off"


def answer_of(name: str) -> Answer:
    """Return which model predicts."""
    return "both" if _BOTH in _added(name) else METHOD_TABLE[method_of(name)].preset.answer


def is_smoothed(name: str) -> bool:
    """Return whether predictions are smoothed over ordered frames."""
    return _SMOOTH in _added(name)


def action_of(name: str, action: Action | None) -> Action:
    """Return the action of its guard, given the guards' configured action."""
    own = METHOD_TABLE[method_of(name)].preset.action
    return action or ("rollback" if own == "off" else own) if is_guarded(name) else "off"


def is_plain_source(name: str) -> bool:
    """Return whether it is the source model alone, whose predictions of an image are the same in any order."""
    return method_of(name) == "source" and not _added(name)


def label_of(name: str) -> str:
    """Return the name that its settings are given for: `random` for `random=rem+guard`, `rem` for `rem+guard`."""
    return name.rpartition("=")[0] or method_of(name)


def check_method_names(names: Sequence[str]) -> None:
    """Raise UsageError, naming the first invalid one, if an evaluation cannot run these names or tell them apart."""
    if not names:
        raise UsageError(f"no method is named; choose {', '.join(METHOD_TABLE)}")
    labels = [label_of(name) for name in names if "=" in name]
    for name in names:
        added, label = _added(name), label_of(name)
        check_method(method_of(name), METHOD_TABLE)
        for addition in added:
            if addition not in _ADDITIONS:
                raise unknown("suffix", f"+{addition}", [f"+{known}" for known in _ADDITIONS])
            if added.count(addition) > 1:
                raise UsageError(f"{name}: +{addition} is there twice; leave one out")
        if "@" in name and (name.partition("@")[2].partition("+")[0] != "cifar" or method_of(name) not in CIFAR):
            raise UsageError(f"{name}: @cifar, for settings for CIFAR, goes with {', '.join(CIFAR)}")
        if names.count(name) > 1:
            raise UsageError(f"{name} is named twice; LABEL={name} runs it again with settings of its own")
        if labels.count(label) > 1:
            raise UsageError(f'two methods are labelled "{label}"; give each a label of its own')
        if "=" in name and (not re.fullmatch(r"[A-Za-z0-9_-]+", label) or label in METHOD_TABLE):
            raise UsageError(
                f'{name}: "{label}" cannot label a method; take letters, digits, - and _, and no method\'s name'
            )
