"""Turn dataclasses of options into the parameters of a Typer command.

The parameters of a command are its arguments, `Annotated[type, typer.Argument(...)]`, and groups: dataclasses whose
fields are options (`remtta.options.option`), nested groups, or neither.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from remtta.options.option import (
    PANELS,
    Option,
    OptionField,
    OptionGroups,
    PassedSettings,
    Subset,
    option_field,
    option_fields,
    read_pairs,
    read_value,
)


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command in a form for Typer: a function whose parameters are all options of its groups.

    Its `fields` are the options by name. Raise TypeError if `Subset` names an option that its group does not have;
    ValueError if two options have the same name.
    """
    groups = _groups(command)
    fields = sorted(
        (field for group in groups for field in _expand(group)),
        key=lambda field: PANELS.index(field.option.panel) if field.option and field.option.panel else -1,
    )
    parameters = [_typer_parameter(field) for field in fields]

    @functools.wraps(command)
    def flat_command(**values: object) -> None:
        command(**{group.name: _build(group, values) for group in groups})

    flat_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by Typer
    flat_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat_command.fields = {field.name: field for field in fields}  # type: ignore[attr-defined]
    return flat_command


def _groups(command: Callable[..., None]) -> list[OptionField]:
    hints = get_type_hints(command, include_extras=True)
    return [
        option_field(name, hints[name], MISSING if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(command).parameters.items()
    ]


def repeated_options(command: Callable[..., None]) -> set[str]:
    """Return the names and flags that several options of a command have."""
    options = [field for group in _groups(command) for field in _expand(group)]
    counts = Counter(name for field in options for name in (field.name, field.flag))
    return {name for name, count in counts.items() if count > 1}


def option_names(group: type) -> set[str]:
    """Return the names of all options of a group, and their flags: {"output", "--output", "-o"}."""
    options = {field.name: field.option for field in _expand(option_field("group", group))}
    flags = {flag for option in options.values() if option for all_ in option.flags for flag in all_.split("/")}
    return {*options, *flags}


def _expand(field: OptionField) -> Iterator[OptionField]:
    """Yield the options and arguments in a parameter of a command, or in a field of a group."""
    if passed := field.first(PassedSettings):
        yield from (replace(setting, command_default=None) for setting in _settings(passed))
    elif extensions := field.first(OptionGroups):
        for name, group in extensions.find().items():
            yield from _expand(option_field(name, group))
    elif field.is_group:
        options = [(nested.name, option) for nested in option_fields(field.type) for option in _expand(nested)]
        subset = field.first(Subset) or Subset(*(option.name for _, option in options))
        known = {option.name for _, option in options} | {nested.name for nested in option_fields(field.type)}
        if unknown := subset.names - known:
            raise TypeError(f"no options of the group: {', '.join(sorted(unknown))}")
        for nested, option in options:
            if not subset.names.isdisjoint((nested, option.name)):
                yield replace(option, command_default=subset.defaults.get(option.name, option.command_default))
    elif field.option or field.first(typer.models.ArgumentInfo):
        yield field


def _settings(passed: PassedSettings) -> list[OptionField]:
    config = passed.config if isinstance(passed.config, type) else passed.config()
    return [field for field in option_fields(config) if field.option]


def _build(field: OptionField, values: Mapping[str, object]) -> object:
    """Return a command's argument or group, or a group's field, from the values of all options."""
    if passed := field.first(PassedSettings):
        settings = [setting for setting in _settings(passed) if values.get(setting.name) is not None]
        return {setting.name: _read(setting, values[setting.name]) for setting in settings}
    if extensions := field.first(OptionGroups):
        return {name: _build(option_field(name, group), values) for name, group in extensions.find().items()}
    if not field.is_group:
        return _read(field, values[field.name])
    members = {option.name for option in _expand(field)}
    values = {name: value for name, value in values.items() if name in members and value is not None}
    arguments = {
        nested.name: _build(nested, values)
        for nested in option_fields(field.type)
        if any(option.name in values for option in _expand(nested))
    }
    return None if field.optional and not arguments else field.type(**arguments)


def _read(field: OptionField, value: object) -> object:
    if isinstance(value, list):
        return read_pairs(value, field.flag) if get_origin(field.type) is Mapping else tuple(value)
    return read_value(field, value) if _is_text(field) and isinstance(value, str) else value


def _is_text(field: OptionField) -> bool:
    """Return whether Typer passes the value as text, for `read_value`."""
    return field.option is not None and (field.is_list or field.option.read is not None)


def _typer_parameter(field: OptionField) -> inspect.Parameter:
    option, value_type, default = field.option, _typer_type(field), _typer_default(field)
    metadata: Any = field.first(typer.models.ArgumentInfo)
    if option:
        takes_bounds = value_type in (int, float)
        metadata = typer.Option(
            *(option.flags or (field.flag,)),
            help=option.text,
            metavar=option.metavar,
            min=option.min if takes_bounds else None,
            max=option.max if takes_bounds else None,
            rich_help_panel=option.panel,
            show_default=_shown_default(field, option),
            autocompletion=_completion(option.complete, is_list=field.is_list) if option.complete else None,
            envvar=f"REMTTA_{field.flag.removeprefix('--').replace('-', '_').upper()}",
            show_envvar=False,
        )
    annotation: Any = Annotated[value_type | None if default is None else value_type, metadata]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typer_type(field: OptionField) -> Any:
    if get_origin(field.type) is Mapping:
        return list[str]
    if get_origin(field.type) is Sequence:
        return list[get_args(field.type)[0]]  # type: ignore[misc]
    return str if _is_text(field) else field.type


def _typer_default(field: OptionField) -> object:
    """Return Typer's default for an option; None if the library's default applies."""
    if field.command_default is not MISSING:
        return field.command_default
    if field.default is MISSING:
        return None if field.optional else inspect.Parameter.empty
    explained = field.option is not None and field.option.default is not None
    return None if explained or not isinstance(field.default, (bool, int, float, str)) else field.default


def _shown_default(field: OptionField, option: Option) -> bool | str:
    """Return the default shown in `--help`; True for Typer's own value."""
    if field.command_default not in (MISSING, None):
        return True
    values = field.default if isinstance(field.default, tuple) else ()
    return option.default or ",".join(map(str, values)) or True


def _completion(known: Mapping[str, str], *, is_list: bool) -> Callable[[str], list[tuple[str, str]]]:
    def complete(incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        return [(f"{before}{comma}{name}", text) for name, text in known.items() if name.startswith(last)]

    return complete
