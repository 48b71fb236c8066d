"""Names of methods in an evaluation: `[LABEL=]METHOD[+guard]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from remtta.errors import UsageError
from remtta.methods.settings import METHOD_CONFIGS

_GUARDED = "+guard"


def method_of(name: str) -> str:
    """The method that an evaluation calls `[LABEL=]METHOD[+guard]`: `rem` for `random=rem+guard`."""
    return name.rpartition("=")[2].removesuffix(_GUARDED)


def is_guarded(name: str) -> bool:
    """Whether it is to run under the guard."""
    return name.endswith(_GUARDED)


def label_of(name: str) -> str:
    """What its settings are given for: `random` for `random=rem+guard`, `rem` for `rem+guard`."""
    return name.rpartition("=")[0] or method_of(name)


def check_method_names(names: Sequence[str]) -> None:
    """Refuse names that an evaluation cannot run or tell apart.

    Raises:
        UsageError: Naming the first of them.
    """
    known = ", ".join(METHOD_CONFIGS)
    if not names:
        raise UsageError(f"no method is named; choose {known}")
    for name in names:
        method, label = method_of(name), label_of(name)
        if method not in METHOD_CONFIGS:
            raise UsageError(f'unknown method "{method}"; choose {known}; most also as NAME{_GUARDED}')
        if names.count(name) > 1:
            raise UsageError(f"{name} is named twice; LABEL={name} runs it again with settings of its own")
        if "=" in name and (not re.fullmatch(r"[A-Za-z0-9_-]+", label) or label in METHOD_CONFIGS):
            raise UsageError(
                f'{name}: "{label}" cannot label a method; take letters, digits, - and _, and no method\'s name'
            )
