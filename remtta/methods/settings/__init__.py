"""Settings of methods. Imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Find what 0.5.0 had here; for this release."""
    homes = {"method_config": "table", "METHOD_TABLE": "table", "REMConfig": "settings.rem_config"}
    if name in homes:
        return getattr(import_module(f"remtta.methods.{homes[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
