"""What a shell completes where Typer does not know the choices; imports no torch."""

from __future__ import annotations

from remtta.methods.settings import METHOD_SUMMARIES
from remtta.options import SCENARIOS


def method_names(incomplete: str) -> list[tuple[str, str]]:
    """Methods that begin so, with what they are."""
    return [(name, text) for name, text in METHOD_SUMMARIES.items() if name.startswith(incomplete)]


def method_list(incomplete: str) -> list[tuple[str, str]]:
    """The same for the last of several with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [(f"{before}{comma}{name}", text) for name, text in method_names(last)]


def stream_methods(incomplete: str) -> list[tuple[str, str]]:
    """Methods that need no labels."""
    return [(name, text) for name, text in method_names(incomplete) if name != "supervised"]


def scenarios(incomplete: str) -> list[str]:
    """Scenarios that begin so."""
    return [name for name in SCENARIOS if name.startswith(incomplete)]
