"""Find methods and backbones that other packages add by entry points."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from remtta.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

METHODS, BACKBONES = "remtta.methods", "remtta.backbones"
"""Groups of entry points."""


def plugins(group: str) -> list[EntryPoint]:
    """Return the entry points of all installed packages in a group, sorted by name."""
    if not any(map(_has_plugin, sys.path)):
        return []
    from importlib.metadata import entry_points  # takes a tenth of the time of `remtta --help`

    return sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of(entry)))


def _has_plugin(folder: str) -> bool:
    for path in Path(folder).glob("*-info/entry_points.txt"):
        with contextlib.suppress(OSError):  # an unreadable file of another package; importlib skips it, too
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


def load_plugin(entry: EntryPoint) -> object:
    """Import and return the object that an entry point names; raise UsageError if that fails, naming the package."""
    try:
        return entry.load()
    except Exception as error:  # a foreign module may raise anything
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"{entry.value} of the package {package_of(entry)} cannot be imported ({problem}); fix or uninstall it"
        ) from error
