"""The lists of docs/options.md are generated from the options' fields: `python -m tests.test_options_page write`."""

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

OWN = ("adapt", "eval", "doctor", "export", "report", "score", "corrupt", "demo", "bench")
"""Commands with a list of what only they have."""

KNOWN = {
    name for command in COMMANDS.values() for each in command.params for name in (*each.opts, *each.secondary_opts)
}

Row = tuple[str, str]
"""An option's names, and what it does, with its default."""


def row_of(command: str, parameter: Any) -> Row:
    field = COMMANDS[command].callback.fields[parameter.name]
    option = field.option
    names = [*parameter.opts, *parameter.secondary_opts]
    choices = "|".join(map(str, get_args(field.type) if get_origin(field.type) is Literal else ()))
    shown = "" if parameter.is_flag else parameter.metavar or choices
    more = f" ([more]({option.more}))" if option and option.more else ""
    text = re.sub(r"(?<!\.\.)\.$", "", parameter.help.replace("<", "&lt;"))
    text = re.sub(r"remtta, fast, [\w, -]+(?=[;.])", "[all methods](methods.md#all-methods)", text)
    default = _default(parameter)
    text = f"{text}{more}" + (f" [{default}]" if default else " (required)" if parameter.required else "")
    return ", ".join([f"`{f'{names[0]} {shown}'.strip()}`", *(f"`{name}`" for name in names[1:])]), text


def _default(parameter: Any) -> str:
    """What holds if the option is missing, or nothing for an option that is then not set, or off."""
    if parameter.is_flag:
        return "on" if parameter.default else ""
    if isinstance(parameter.show_default, str):
        return str(parameter.show_default).replace("<", "&lt;")
    if parameter.default is None:
        return ""
    return str(getattr(parameter.default, "value", parameter.default))


def lists() -> dict[str, str]:
    """Return the page's lists by name: shared options by panel, and those of each command."""
    users: dict[Row, list[tuple[str, Any]]] = defaultdict(list)
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and "--help" not in parameter.opts:
                users[row_of(name, parameter)].append((name, parameter))
    made: dict[str, str] = defaultdict(str)
    for (names, text), uses in users.items():
        commands = {command for command, _ in uses}
        if len(commands) == 1 and commands <= set(OWN):
            made[uses[0][0]] += f"- {names}: {text}\n"
        else:
            panel = {"Model": "the model", "Method": "the method"}.get(uses[0][1].rich_help_panel, "running")
            of = "" if len(commands) > 4 or commands == {"adapt", "eval"} else f" (of {', '.join(sorted(commands))})"
            made[panel] += f"- {names}{of}: {text}\n"
    return made


def page(text: str) -> str:
    """Return the page with regenerated lists."""
    made = lists()
    return TABLE.sub(lambda found: found[1] + made.pop(found[2]) + found[3], text)


def test_the_lists_are_those_of_the_fields() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m tests.test_options_page write"
    assert set(lists()) == {name for _, name, _ in TABLE.findall(text)}


if __name__ == "__main__" and sys.argv[1:] == ["write"]:
    PAGE.write_text(page(PAGE.read_text()))
