"""Modules that documents of 0.5.0 named, found under their old names for this release, with a warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_EVALUATION = "remtta.lab.evaluation"
_MOVED = {
    "remtta.bench": ("remtta.lab.bench",),
    "remtta.corruptions": ("remtta.lab.corruptions",),
    "remtta.corruptions.tree": ("remtta.lab.corruptions.tree",),
    "remtta.evaluation": (f"{_EVALUATION}.datasets", f"{_EVALUATION}.evaluating", f"{_EVALUATION}.preprocessing"),
    "remtta.evaluation.domains": (f"{_EVALUATION}.domains",),
    "remtta.export": ("remtta.formats.export",),
}
"""The modules that have what is in an old one."""

_log = logging.getLogger("remtta")


class _Old:
    """Finder and loader; not a subclass of their base classes, whose import takes longer than all of this."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True) if name in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create it."""

    def exec_module(self, module: ModuleType) -> None:
        places = _MOVED[module.__name__]
        _log.warning("%s has moved to %s; the old name works for this release", module.__name__, " and ".join(places))

        def find(name: str) -> Any:
            for place in map(import_module, places):
                if not name.startswith("__") and hasattr(place, name):
                    return getattr(place, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def find_moved_modules() -> None:
    """Let Python find the old names."""
    sys.meta_path.append(_Old())
