"""docs/options.md names every option of every command with its default, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from remtta.cli import app
from remtta.methods.settings import REMConfig

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
MAIN: Any = typer.main.get_command(app)  # of the Click that Typer brings along, which has no types
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
COMMANDS: dict[str, Any] = MAIN.commands
COMMON = {"--help"}.union(*(option.opts for option in MAIN.params))


def options_of(command: str) -> dict[str, Any]:
    """A command's parameters by their long options, but for --help."""
    parameters = [parameter for parameter in COMMANDS[command].params if parameter.param_type_name == "option"]
    return {
        name: parameter
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }


def rows() -> Iterator[tuple[str, str, str]]:
    """Command, long option and default of every row of the page's tables."""
    heading, shared = "", False
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if cells and cells[0] == "option":
            shared = cells[1] == "of"
        elif cells and OPTION.search(cells[0]):
            commands = re.findall(r"`([\w-]+)`", cells[1]) if shared else re.findall(r"`remtta ([\w-]+)", heading)
            for command in commands:
                for option in OPTION.findall(cells[0]):
                    yield command, option, cells[1 + shared]


def test_every_option_of_every_command_is_on_the_page_once() -> None:
    documented = sorted((command, option) for command, option, _ in rows())
    assert documented == sorted((command, option) for command in COMMANDS for option in options_of(command))


def test_the_page_names_no_option_that_does_not_exist() -> None:
    known = COMMON.union(*(options_of(command) for command in COMMANDS))
    named = set(OPTION.findall(PAGE.read_text()))
    assert named - known == set() and named >= COMMON


def test_every_default_on_the_page_is_the_commands() -> None:
    for command, option, told in rows():
        parameter = options_of(command)[option]
        if parameter.is_flag:
            assert told == ("on" if parameter.default else "off"), (command, option)
        elif parameter.default is not None:
            assert (
                told == str(getattr(parameter.default, "value", parameter.default)) or told == f"`{parameter.default}`"
            )
        else:
            assert (told == "required") == parameter.required, (command, option)


@pytest.mark.parametrize("setting", ["lr", "optimizer", "momentum", "steps", "margin", "ranking_weight", "mask_ratios"])
def test_the_defaults_of_rem_are_the_methods(setting: str) -> None:
    option = {"ranking_weight": "--lambda"}.get(setting, f"--{setting.replace('_', '-')}")
    value: Any = getattr(REMConfig(), setting)
    text = ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
    told = text if isinstance(text, str) else f"{text:g}"
    assert {cell for _, name, cell in rows() if name == option} == {f"rem: {told}"}
