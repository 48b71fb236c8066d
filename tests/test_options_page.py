"""The tables of docs/options.md are generated from the options' fields: `python -m tests.test_options_page write`."""

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tests.command import command_line

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
MAIN = command_line()
COMMANDS: dict[str, Any] = MAIN.commands
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
TABLE = re.compile(r"(<!-- options: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
ELSEWHERE = {"--help", "--help-all", *(name for option in MAIN.params for name in option.opts)}

OWN = ("adapt", "eval", "doctor", "export", "report", "corrupt", "demo", "bench")
"""Commands with a table of what only they have."""

KNOWN = {
    name for command in COMMANDS.values() for each in command.params for name in (*each.opts, *each.secondary_opts)
}

Row = tuple[str, str, str]
"""An option's names, its default, and what it does."""


def row_of(command: str, parameter: Any) -> Row:
    field = COMMANDS[command].callback.fields[parameter.name]
    option = field.option
    names = [*parameter.opts, *parameter.secondary_opts]
    choices = "|".join(map(str, get_args(field.type) if get_origin(field.type) is Literal else ()))
    shown = "" if parameter.is_flag else parameter.metavar or choices
    first = f"`{f'{names[0]} {shown}'.strip()}`".replace("|", r"\|")
    more = f" ([more]({option.more}))" if option and option.more else ""
    text = re.sub(r"(?<!\.\.)\.$", "", parameter.help.replace("|", r"\|").replace("<", "&lt;"))
    return ", ".join([first, *(f"`{name}`" for name in names[1:])]), _default(parameter), f"{text}{more}"


def _default(parameter: Any) -> str:
    if parameter.is_flag:
        return "on" if parameter.default else "off"
    if isinstance(parameter.show_default, str):
        return str(parameter.show_default).replace("<", "&lt;")
    if parameter.default is None:
        return "required" if parameter.required else "none"
    return str(getattr(parameter.default, "value", parameter.default))


def tables() -> dict[str, str]:
    """Return the page's tables by name: shared options by panel, and those of each command."""
    users: dict[Row, list[tuple[str, Any]]] = defaultdict(list)
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and "--help" not in parameter.opts:
                users[row_of(name, parameter)].append((name, parameter))
    made: dict[str, list[str]] = defaultdict(list)
    for (names, default, text), uses in users.items():
        if len(uses) == 1 and (command := uses[0][0]) in OWN:
            made[command].append(f"| {names} | {default} | {text} |")
        else:
            panel = {"Model": "the model", "Method": "the method"}.get(uses[0][1].rich_help_panel, "running")
            of = " ".join(f"`{command}`" for command, _ in uses)
            made[panel].append(f"| {names} | {of} | {default} | {text} |")
    heads = dict.fromkeys(set(made) - set(COMMANDS), "| option | of | default | meaning |\n|---|---|---|---|")
    own = "| option | default | meaning |\n|---|---|---|"
    return {name: "\n".join([heads.get(name, own), *rows]) + "\n" for name, rows in made.items()}


def page(text: str) -> str:
    """Return the page with regenerated tables."""
    made = tables()
    return TABLE.sub(lambda found: found[1] + made.pop(found[2]) + found[3], text)


def test_the_tables_are_those_of_the_fields() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m tests.test_options_page write"
    assert set(tables()) == {name for _, name, _ in TABLE.findall(text)}


if __name__ == "__main__" and sys.argv[1:] == ["write"]:
    PAGE.write_text(page(PAGE.read_text()))
