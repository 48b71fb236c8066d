"""Options are declared once, in groups: a command takes groups, and Typer sees their options in their places.

A group is a frozen dataclass. Its fields are options, `name: Annotated[type, typer.Option(...)] = default`, or groups
again. The parameters of a command are its arguments, `Annotated[type, typer.Argument(...)]`, and groups.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Only:
    """The options that a command takes of a group, some with another default: `Annotated[Group, Only("a", b=1)]`.

    They keep the group's order. The others are no options of the command, and have the group's defaults.
    """

    def __init__(self, *names: str, **defaults: object) -> None:
        self.names, self.defaults = {*names, *defaults}, defaults

    def of(self, options: list[inspect.Parameter]) -> list[inspect.Parameter]:
        """These of a group's options."""
        if unknown := self.names - {option.name for option in options}:
            raise TypeError(f"no options of the group: {', '.join(sorted(unknown))}")
        chosen = [option for option in options if option.name in self.names]
        return [option.replace(default=self.defaults.get(option.name, option.default)) for option in chosen]


class _Member(NamedTuple):
    parameter: inspect.Parameter
    group: Callable[..., Any] | None
    only: Only | None


def options_of(owner: Callable[..., Any]) -> list[inspect.Parameter]:
    """A command's or a group's arguments and options, in order, with names, annotations and defaults."""
    options: list[inspect.Parameter] = []
    for parameter, group, only in _members(owner):
        within = [parameter] if group is None else options_of(group)
        options += within if only is None else only.of(within)
    return options


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer takes it: a function of all its groups' options.

    Raises:
        TypeError: If `Only` names an option that its group does not have.
        ValueError: If two options have one name.
    """
    options = options_of(command)

    @functools.wraps(command)
    def flattened(**values: Any) -> None:
        _call(command, values)

    flattened.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what Typer looks at
    flattened.__annotations__ = {option.name: option.annotation for option in options}
    return flattened


def _call(owner: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a command, or build a group, with the values that there are."""
    arguments = {}
    for parameter, group, only in _members(owner):
        if group is not None:
            within = values if only is None else {name: values[name] for name in only.names if name in values}
            arguments[parameter.name] = _call(group, within)
        elif parameter.name in values:
            arguments[parameter.name] = values[parameter.name]
    return owner(**arguments)


@functools.cache
def _members(owner: Callable[..., Any]) -> list[_Member]:
    """Parameters of a command, or fields of a group, and which of them are groups."""
    hints = get_type_hints(owner, include_extras=True)
    members = []
    for parameter in inspect.signature(owner).parameters.values():
        annotation = hints[parameter.name]
        kind, *more = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        members.append(
            _Member(
                parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY),
                kind if isinstance(kind, type) and is_dataclass(kind) else None,
                next((each for each in more if isinstance(each, Only)), None),
            )
        )
    return members
