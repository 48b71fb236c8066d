"""Names of methods in an evaluation: `[LABEL=]METHOD[+guard][+both|+auto][+smooth]`; presets are some, too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from remtta.errors import UsageError
from remtta.methods.settings import METHOD_CONFIGS, check_method
from remtta.options import Action, Answer

PRESET = "remtta"
"""REM as `remtta adapt` runs it where nothing is asked for."""

FAST = "fast"
"""What `remtta adapt --preset fast` runs: Tent, likewise."""

_PRESET_METHODS = {PRESET: "rem+guard+auto", FAST: "tent+guard+auto"}
_GUARDED, _BOTH, _AUTO, _SMOOTH = "guard", "both", "auto", "smooth"


def _parts(name: str) -> list[str]:
    """The method's name, and what is added to it."""
    method, *added = name.rpartition("=")[2].split("+")
    preset = preset_in(name)
    return [*_PRESET_METHODS[preset].split("+"), *added] if preset else [method, *added]


def method_of(name: str) -> str:
    """The method that an evaluation calls so: `rem` for `random=rem+guard`, and for presets."""
    return _parts(name)[0]


def preset_in(name: str) -> str | None:
    """The preset that its settings are of, if there is one in the name."""
    method, *added = name.rpartition("=")[2].split("+")
    return method if method in _PRESET_METHODS and set(added) <= {_SMOOTH} else None


def is_guarded(name: str) -> bool:
    """Whether it is to run under the guard."""
    return _GUARDED in _parts(name)


def answer_of(name: str) -> Answer:
    """Who is to answer."""
    parts = _parts(name)
    return "both" if _BOTH in parts else "auto" if _AUTO in parts else "adapted"


def is_smoothed(name: str) -> bool:
    """Whether its answers go by the frames before, too, where those come in order."""
    return _SMOOTH in _parts(name)


def action_of(name: str, action: Action) -> Action:
    """What its guard is to do, where guards do this."""
    return action if is_guarded(name) else "off"


def label_of(name: str) -> str:
    """What its settings are given for: `random` for `random=rem+guard`, `rem` for `rem+guard`, a preset for itself."""
    return name.rpartition("=")[0] or preset_in(name) or method_of(name)


def check_method_names(names: Sequence[str]) -> None:
    """Refuse names that an evaluation cannot run or tell apart.

    Raises:
        UsageError: Naming the first of them.
    """
    known = [*METHOD_CONFIGS, *_PRESET_METHODS]
    if not names:
        raise UsageError(f"no method is named; choose {', '.join(known)}")
    for name in names:
        (method, *added), label = _parts(name), label_of(name)
        if stands_for := _PRESET_METHODS.get(method):
            raise UsageError(f"{name}: {method} stands for {stands_for} already; leave +{'+'.join(added)} out")
        check_method(method, known)
        additions = {_GUARDED, _BOTH, _AUTO, _SMOOTH}
        if not set(added) <= additions or len(set(added)) < len(added) or {_BOTH, _AUTO} <= set(added):
            raise UsageError(f"{name}: add +guard, +both or +auto, and +smooth to a method, once each")
        if names.count(name) > 1:
            raise UsageError(f"{name} is named twice; LABEL={name} runs it again with settings of its own")
        if "=" in name and (not re.fullmatch(r"[A-Za-z0-9_-]+", label) or label in known):
            raise UsageError(
                f'{name}: "{label}" cannot label a method; take letters, digits, - and _, and no method\'s name'
            )
