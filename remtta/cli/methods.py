"""`remtta methods`: what there is to choose from, and each method's settings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
from typing import Annotated

import typer

from remtta.cli.completion import method_names
from remtta.cli.reporting import command
from remtta.methods.settings import METHOD_CONFIGS, METHOD_SUMMARIES, MethodConfig, check_method
from remtta.methods.settings.names import PRESET, method_of, preset_in
from remtta.methods.settings.presets import PRESETS

_INDENT = " " * 6


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method; without one, all are listed.", autocompletion=method_names)
    ] = None,
) -> None:
    """List the methods, or the settings of one with their defaults.

    Set them with `--set NAME.KEY=VALUE` in remtta eval, `--set KEY=VALUE` in remtta adapt.

    Examples:

      remtta methods

      remtta methods tent
    """
    with command():
        if name is None:
            width = max(map(len, METHOD_CONFIGS))
            typer.echo("\n".join(f"{method:<{width}}  {text}" for method, text in METHOD_SUMMARIES.items()))
            return
        name = method_of(name) if preset_in(name) else name
        check_method(name, METHOD_CONFIGS)
        typer.echo(f"{name}: {METHOD_SUMMARIES[name]}\n")
        kind = METHOD_CONFIGS[name]
        texts, ours = _explanations(kind), PRESETS[PRESET].settings.get(name, {})
        for field in dataclasses.fields(kind):
            if field.name in kind.unused:
                continue
            default, text = _plain(field.default), texts.get(field.name, "")
            if field.name == "lr" and kind.lr_batch:
                default += f" at a batch of {kind.lr_batch}, in proportion to others"
            if field.name in ours:
                default += f" as published, {ours[field.name]} in remtta adapt (--preset {PRESET})"
            typer.echo(f"  {field.name} = {default}")
            typer.echo(textwrap.fill(text, _width(), initial_indent=_INDENT, subsequent_indent=_INDENT))


def _explanations(kind: type[MethodConfig]) -> dict[str, str]:
    """What a config's docstrings say about its settings, and those of the configs it builds on."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}\S.*)*)", section, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return str(value)
