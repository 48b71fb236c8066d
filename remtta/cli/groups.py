"""Declare options once, as fields of dataclasses, and present them to Typer as a command's parameters.

The parameters of a command are its arguments, `Annotated[type, typer.Argument(...)]`, and groups: dataclasses whose
fields are options (`remtta.options.option`), nested groups, or neither.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from remtta.options.option import (
    PANELS,
    OptionField,
    PassedSettings,
    Subset,
    is_list,
    member_of,
    option_fields,
    read_pairs,
    read_value,
)


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command in a form for Typer: a function of all options of its groups.

    Its `members` are the options by name. Raise TypeError if `Subset` names an option that its group does not have;
    ValueError if two options have the same name.
    """
    own = _parameters(command)
    members = sorted((each for member in own for each in _inside(member)), key=_place)
    parameters = [_parameter(member) for member in members]

    @functools.wraps(command)
    def flattened(**values: Any) -> None:
        command(**{member.name: _value(member, values) for member in own})

    flattened.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by Typer
    flattened.__annotations__ = {each.name: each.annotation for each in parameters}
    flattened.members = {member.name: member for member in members}  # type: ignore[attr-defined]
    return flattened


def _parameters(command: Callable[..., None]) -> list[OptionField]:
    hints = get_type_hints(command, include_extras=True)
    return [
        member_of(name, hints[name], MISSING if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(command).parameters.items()
    ]


def _inside(member: OptionField) -> Iterator[OptionField]:
    """Yield the options and arguments in a parameter of a command, or in a field of a group."""
    if given := member.first(PassedSettings):
        yield from (replace(each, own_default=None) for each in option_fields(given.config) if each.option)
    elif member.is_group:
        yield from _chosen(
            member.first(Subset), [each for field in option_fields(member.type) for each in _inside(field)]
        )
    elif member.option or member.first(typer.models.ArgumentInfo):
        yield member


def _chosen(only: Subset | None, members: list[OptionField]) -> list[OptionField]:
    if only is None:
        return members
    if unknown := only.names - {each.name for each in members}:
        raise TypeError(f"no options of the group: {', '.join(sorted(unknown))}")
    chosen = [each for each in members if each.name in only.names]
    return [replace(each, own_default=only.defaults.get(each.name, each.own_default)) for each in chosen]


def _place(member: OptionField) -> int:
    """Return the position of an option's panel in `--help`."""
    panel = member.option.panel if member.option else None
    return PANELS.index(panel) if panel else -1


def _value(member: OptionField, values: Mapping[str, Any]) -> Any:
    """Return a command's argument or group, or a group's field, from the values of all options."""
    if given := member.first(PassedSettings):
        options = {each.name: each for each in option_fields(given.config) if each.option}
        return {name: _read(each, values[name]) for name, each in options.items() if values.get(name) is not None}
    if not member.is_group:
        return _read(member, values[member.name])
    own = {each.name for each in _inside(member)}
    chosen = {name: value for name, value in values.items() if name in own and value is not None}
    arguments = {}
    for each in option_fields(member.type):
        if any(option.name in chosen for option in _inside(each)):
            arguments[each.name] = _value(each, chosen)
    return None if member.optional and not arguments else member.type(**arguments)


def _read(member: OptionField, value: Any) -> Any:
    if get_origin(member.type) is Mapping and member.option:
        return read_pairs(value, member.flag)
    if isinstance(value, list):
        return tuple(value)
    return read_value(member, value) if _is_text(member) and isinstance(value, str) else value


def _is_text(member: OptionField) -> bool:
    """Return whether its value is parsed from text."""
    return bool(member.option) and (is_list(member) or member.option.read is not None)  # type: ignore[union-attr]


def _parameter(member: OptionField) -> inspect.Parameter:
    option, kind, default = member.option, _kind(member), _default(member)
    metadata: Any = member.first(typer.models.ArgumentInfo)
    if option:
        takes_bounds = kind in (int, float)
        metadata = typer.Option(
            *(option.flags or (member.flag,)),
            help=option.help,
            metavar=option.metavar,
            min=option.min if takes_bounds else None,
            max=option.max if takes_bounds else None,
            rich_help_panel=option.panel,
            show_default=_shown_default(member),
            autocompletion=_completion(member),
            envvar=f"REMTTA_{member.flag.removeprefix('--').replace('-', '_').upper()}",
            show_envvar=False,
        )
    annotation: Any = Annotated[kind | None if default is None else kind, metadata]
    return inspect.Parameter(member.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shown_default(member: OptionField) -> bool | str:
    """Return the default shown in `--help`; True for Typer's own value."""
    if member.own_default not in (MISSING, None) or member.option is None:
        return True
    values = member.default if isinstance(member.default, tuple) else ()
    return member.option.default or ",".join(map(str, values)) or True


def _kind(member: OptionField) -> Any:
    if get_origin(member.type) is Mapping:
        return list[str]
    if get_origin(member.type) is Sequence:
        return list[get_args(member.type)[0]]  # type: ignore[misc]
    return str if _is_text(member) else member.type


def _default(member: OptionField) -> Any:
    """Return Typer's default for an option; None if the library's default applies."""
    if member.own_default is not MISSING:
        return member.own_default
    if member.default is MISSING:
        return None if member.optional else inspect.Parameter.empty
    explained = member.option is not None and member.option.default is not None
    return None if explained or not isinstance(member.default, (bool, int, float, str)) else member.default


def _completion(member: OptionField) -> Callable[[str], list[tuple[str, str]]] | None:
    assert member.option
    if (known := member.option.complete) is None:
        return None

    def complete(incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",") if is_list(member) else ("", "", incomplete)
        return [(f"{before}{comma}{name}", text) for name, text in known.items() if name.startswith(last)]

    return complete
