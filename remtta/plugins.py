"""What other packages add, by entry points. Nothing of theirs is imported to find it."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from remtta.errors import UsageError

METHODS, BACKBONES = "remtta.methods", "remtta.backbones"
"""Groups of entry points."""


def plugins(group: str) -> list[EntryPoint]:
    """Entry points of all installed packages in a group, by name."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of(entry)))


def package_of(entry: EntryPoint) -> str:
    """Name of the package that has an entry point."""
    return entry.dist.name if entry.dist else entry.module


def summary_of(entry: EntryPoint) -> str:
    """A line about an entry point, from its package's metadata."""
    summary = entry.dist.metadata["Summary"] if entry.dist and "Summary" in entry.dist.metadata else ""
    return f"{summary} (package {package_of(entry)})".lstrip()


def load_plugin(entry: EntryPoint) -> Any:
    """Import what an entry point names.

    Raises:
        UsageError: If that fails, naming the package.
    """
    try:
        return entry.load()
    except Exception as error:  # whatever a module of somebody else raises
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"{entry.value} of the package {package_of(entry)} cannot be imported ({told}); mend or uninstall it"
        ) from error
