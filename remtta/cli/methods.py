"""`remtta methods`: list the methods, and each method's settings."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import shutil
import textwrap
from typing import Annotated

import typer

from remtta.cli.reporting import command
from remtta.methods.settings import FULL_BATCH, METHOD_SUMMARIES, METHOD_TABLE, REFUSED, MethodConfig, check_method

_INDENT = " " * 6

_log = logging.getLogger("remtta")


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A method; by default all.",
            autocompletion=lambda incomplete: [
                each for each in METHOD_SUMMARIES.items() if each[0].startswith(incomplete)
            ],
        ),
    ] = None,
) -> None:
    """List the methods, or one method's settings and their defaults.

    To change a setting: --set KEY=VALUE in remtta adapt, --set NAME.KEY=VALUE in remtta eval.

    Examples:

      remtta methods

      remtta methods tent
    """
    with command():
        if name is None:
            width = max(map(len, METHOD_TABLE))
            typer.echo("\n".join(f"{method:<{width}}  {text}" for method, text in METHOD_SUMMARIES.items()))
            for why in REFUSED.values():
                _log.warning("%s", why)
            return
        check_method(name, METHOD_TABLE)
        named, preset = METHOD_TABLE[name], METHOD_TABLE[name].preset
        kind, texts = named.config, _explanations(named.config)
        typer.echo(f"{name}: {named.summary}\nguard {preset.action}, answer {preset.answer}\n")
        for field in dataclasses.fields(kind):
            if field.name in kind.unused:
                continue
            default = _plain(preset.settings.get(field.name, field.default))
            if field.name == "lr" and "lr" in preset.settings:
                default += f" for batches of {FULL_BATCH} or more, proportionally lower for smaller ones"
            elif field.name == "lr" and kind.lr_batch:
                default += f" at a batch of {kind.lr_batch}, proportional to the batch size"
            typer.echo(f"  {field.name} = {default}")
            text = texts.get(field.name, "")
            width = min(100, shutil.get_terminal_size().columns)
            typer.echo(textwrap.fill(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT))


def _explanations(kind: type[MethodConfig]) -> dict[str, str]:
    """Return the descriptions of a config's settings from its docstring and those of its base classes."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}\S.*)*)", section, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return str(value)
