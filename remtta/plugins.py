"""Find what other packages add by entry points, without importing them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remtta.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

METHODS, BACKBONES = "remtta.methods", "remtta.backbones"
"""Groups of entry points."""


def plugins(group: str) -> list[EntryPoint]:
    """Return the entry points of all installed packages in a group, sorted by name."""
    if not any(map(_names_remtta, sys.path)):
        return []
    from importlib.metadata import entry_points  # a tenth of what `remtta --help` takes

    return sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of(entry)))


def _names_remtta(folder: str) -> bool:
    for path in Path(folder).glob("*-info/entry_points.txt"):
        with contextlib.suppress(OSError):  # another package's file that may not be read; importlib skips it, too
            if "[remtta." in path.read_text("utf-8", "replace"):
                return True
    return False


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that has an entry point."""
    return entry.dist.name if entry.dist else entry.module


def summary_of(entry: EntryPoint) -> str:
    """Return a one-line description of an entry point, from its package's metadata."""
    summary = entry.dist.metadata["Summary"] if entry.dist and "Summary" in entry.dist.metadata else ""
    return f"{summary} (package {package_of(entry)})".lstrip()


def load_plugin(entry: EntryPoint) -> Any:
    """Import and return the object that an entry point names; raise UsageError if that fails, naming the package."""
    try:
        return entry.load()
    except Exception as error:  # whatever a module of somebody else raises
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"{entry.value} of the package {package_of(entry)} cannot be imported ({problem}); fix or uninstall it"
        ) from error
