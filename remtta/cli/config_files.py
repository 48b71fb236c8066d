"""Read a command's options from a YAML file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer

from remtta.errors import UsageError
from remtta.options.option import read_regular

_NOT_IN_FILES = ("help", "config")
_MAX_BYTES = 1024**2
_TRUTH = {"true": True, "false": False}


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the options in the file of --config as defaults; the command line takes precedence."""
    if path is None or ctx.resilient_parsing:
        return path
    options = {_key(option): option for option in _options(ctx)}
    names = {name.replace("_", "-"): key for key, option in options.items() for name in _names(option)}
    values: dict[str, Any] = {}
    for given, value in _load(path):
        key = names.get(given.replace("_", "-"))
        if key is None:
            close = difflib.get_close_matches(given.replace("_", "-"), names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"remtta {ctx.info_name} --help names them all"
            raise UsageError(f'{path}: remtta {ctx.info_name} has no option "{given}"; {hint}')
        option = options[key]
        if option.name in values:
            raise UsageError(f"{path}: {key} is given twice")
        values[option.name] = _value(f"{path}: {given}", option, value)
    ctx.default_map = values
    return path


def _options(ctx: typer.Context) -> list[Any]:
    parameters: list[Any] = ctx.command.params
    return [each for each in parameters if each.param_type_name == "option" and each.name not in _NOT_IN_FILES]


def _names(option: Any) -> list[str]:
    return [name.removeprefix("--") for name in option.opts if name.startswith("--")]


def _key(option: Any) -> str:
    name, *_ = _names(option)
    return name


def _load(path: Path) -> list[tuple[str, Any]]:
    """Return a file's options; every value is a string, a list or mapping of them, or None."""
    import yaml

    text = read_regular(path, _MAX_BYTES, "a file of options")
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            return []
        if node.id == "mapping":
            return [(str(name.value), _as_written(value)) for name, value in node.value]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    raise UsageError(f'{path} holds no options; write one per line, such as "batch-size: 20"')


def _as_written(node: Any) -> Any:
    """Return a value as written, since its option determines its type: `off`, `1e-3`, `0,1`."""
    if node.id == "sequence":
        return [_as_written(each) for each in node.value]
    if node.id == "mapping":
        return {name.value: _as_written(value) for name, value in node.value}
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _value(where: str, option: Any, value: Any) -> Any:
    """Return a value in the form of the command line."""
    if value is None:
        return None
    if option.is_flag:
        if (truth := _TRUTH.get(str(value).lower())) is None:
            raise UsageError(f"{where} is true or false, got {value}")
        return truth
    if isinstance(value, dict) and option.multiple:  # pairs, such as img_size: 32
        value = [f"{name}={_text(where, each)}" for name, each in value.items()]
    texts = [_text(where, each) for each in value] if isinstance(value, list) else [_text(where, value)]
    if option.multiple:
        return texts
    if option.nargs > 1:
        texts *= option.nargs if len(texts) == 1 else 1
        if len(texts) != option.nargs:
            raise UsageError(f"{where} takes {option.nargs} numbers, or one for all; got {' '.join(texts)}")
        return texts
    return ",".join(texts)  # a list for an option that takes commas: [source, rem]


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} takes a single value, a list of them, or pairs; got {value}")
    if not value:
        raise UsageError(f"{where} is empty; give a value, or leave it out")
    return value
