"""`remtta methods`: what there is to choose from, and each method's settings."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from remtta.cli.reporting import command
from remtta.config import METHOD_CONFIGS, METHOD_SUMMARIES
from remtta.errors import UsageError


def methods(
    name: Annotated[str | None, typer.Argument(help="A method; without one, all are listed.")] = None,
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
        if name not in METHOD_CONFIGS:
            raise UsageError(f'unknown method "{name}"; choose {", ".join(METHOD_CONFIGS)}')
        typer.echo(f"{name}: {METHOD_SUMMARIES[name]}\n")
        kind = METHOD_CONFIGS[name]
        shown = {field.name: _plain(field.default) for field in dataclasses.fields(kind)}
        if kind.lr_batch:
            shown["lr"] += f" at a batch of {kind.lr_batch}, in proportion to others"
        width = max(map(len, shown))
        typer.echo("\n".join(f"  {key:<{width}}  {value}" for key, value in shown.items()))


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return "-" if value is None else str(value)
