"""Parsing of the command line: spread values, --help-all, and usage errors in one line."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from remtta.cli.reporting import EXIT_CODES, discard_output, one_line, print_message
from remtta.errors import UsageError, listed, without_password
from remtta.options.option import OptionField

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter
    from typer._click.core import Command as ClickCommand

_NUMBERS = {"--mean": 3, "--std": 3, "--input-size": 2}
"""Options of several numbers, for which a single one may be given."""

_PLAIN_MESSAGES = {
    ": Value error, ": ": ",
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be a valid boolean, unable to interpret input": "must be true or false",
}

_MAX_SHOWN, _MAX_OPTIONS = 3, 30
_ALL = "remtta.help_all"


class Application(TyperGroup):
    """All commands; a usage error is one line, on a terminal too."""

    def main(self, *args: Any, **more: Any) -> object:
        """Run a command, and exit with its code unless `standalone_mode` is false."""
        if not more.get("standalone_mode", True):
            return super().main(*args, **more)
        try:
            code = super().main(*args, **{**more, "standalone_mode": False})
        except SystemExit as error:  # raised by rich for a closed pipe, such as that of `--help | head`
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            discard_output(sys.stdout)
            sys.exit(0)
        except UsageError as error:
            text, code = str(error), EXIT_CODES[UsageError]
        except OSError as error:  # from printing help; commands handle their own
            text, code = f"standard output cannot be written: {error.strerror}", 1
        except Exception as error:
            if not hasattr(error, "format_message"):  # common to all errors of Typer
                raise
            text, code = error.format_message(), getattr(error, "exit_code", 1)
        else:
            sys.exit(code)
        if text.strip():  # without a command, help is shown instead of an error
            text = one_line(text)
            for message, plain_message in _PLAIN_MESSAGES.items():
                text = text.replace(message, plain_message)
            print_message(f"Error: {text}")
        sys.exit(code)


class Command(TyperCommand):
    """A command whose values may be spread over several words."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the command line; raise UsageError if that is impossible."""
        ctx.allow_extra_args = True
        if "--help-all" in args:
            print_all_help(ctx)  # type: ignore[arg-type]
        if not ctx.resilient_parsing:
            refuse_empty(args)
        for flag, count in _NUMBERS.items():
            variable = f"REMTTA_{flag.removeprefix('--').replace('-', '_').upper()}"
            if len(os.environ.get(variable, "").split()) == 1:
                os.environ[variable] = " ".join([os.environ[variable]] * count)
        try:
            rest = super().parse_args(ctx, spread_values(args))
        except Exception as error:
            option = getattr(error, "param", None)
            if option is None or getattr(ctx.get_parameter_source(option.name), "name", "") != "ENVIRONMENT":
                raise
            raise UsageError(f"{option.envvar}: {error.format_message()}") from error  # type: ignore[attr-defined]
        if rest and not ctx.resilient_parsing:
            source = [ctx.params["source"]] if self.name == "adapt" else []
            raise UsageError(_too_many(source, rest, has_streams="streams" in ctx.params))
        _refuse_addresses(ctx.params.values())
        return rest

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return the usage line with SOURCE instead of {SOURCE}."""
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Print the help; for a command with many options only the common ones."""
        options = [parameter for parameter in self.params if isinstance(parameter, TyperOption)]
        fields: Mapping[str, OptionField] = getattr(self.callback, "fields", {})
        common = {name for name, field in fields.items() if field.option and field.option.common}
        rare = [option for option in options if option.name not in {*common, "help"}]
        if len(options) <= _MAX_OPTIONS or ctx.meta.get(_ALL):
            rare = []
        for option in rare:
            option.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for option in rare:
                option.hidden = False
        if rare:
            typer.echo(f" {len(rare)} more options: {ctx.command_path} --help-all\n")


def warn_of_variables(commands: Iterable[ClickCommand]) -> None:
    """Warn of environment variables that look like a misspelt option.

    Other variables may belong to other programs: Kubernetes sets REMTTA_SERVICE_HOST.
    """
    known = {option.envvar for command in commands for option in command.params if isinstance(option.envvar, str)}
    for name in sorted(os.environ.keys() - known):
        if name.startswith("REMTTA_") and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.85)):
            print_message(f"{name} is ignored: no option has this name; did you mean {close[0]}?")


def print_all_help(ctx: typer.Context, requested: bool = True) -> None:
    """Print the whole help of a command, or of every command in turn, for `--help-all`."""
    if requested:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        for name, command in getattr(ctx.command, "commands", {}).items():
            typer.echo(type(ctx)(command, parent=ctx, info_name=name).get_help())
        raise typer.Exit


def _refuse_addresses(values: Iterable[object]) -> None:
    """Raise UsageError for addresses such as s3://bucket/folder in place of a path; `Path` keeps one of the slashes."""
    for path in (item for value in values for item in (value if isinstance(value, list) else [value])):
        if isinstance(path, PurePath) and re.match(r"[a-z][a-z0-9+.:-]+:/", path.as_posix(), re.IGNORECASE):
            shown = without_password(path.as_posix().replace(":/", "://", 1))
            raise UsageError(f"{shown}: paths are local; mount the bucket, or copy the folder to this machine")


def refuse_empty(args: Sequence[str]) -> None:
    """Raise UsageError for empty values, which unset shell variables give."""
    for previous, word in pairwise(["", *args]):
        option, equals, value = word.partition("=")
        if word == "":
            what = previous if previous.startswith("-") and previous not in ("-", "--") else "an argument"
        elif option.startswith("--") and equals and not value:
            what = option
        else:
            continue
        raise UsageError(f"{what} is empty (is a variable of the shell not set?); give a value, or leave it out")


def spread_values(args: Sequence[str]) -> list[str]:
    """Let one `--model-kwargs` take several key=value pairs, as timm's scripts do, and repeat a single number for an
    option of several numbers; raise UsageError if it has the wrong number of them.
    """
    spread: list[str] = []
    words = list(args)
    while words:
        option, equals, value = words.pop(0).partition("=")
        if option == "--":
            return [*spread, option, *words]
        values = [value] if equals else []
        if option == "--model-kwargs":
            values += [] if equals or not words else [words.pop(0)]
            values += _leading(words, r"[A-Za-z_]\w*=.*")
            spread += [part for pair in values for part in (option, pair)] or [option]
        elif option in _NUMBERS:
            count = _NUMBERS[option]
            values += _leading(words, r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", count - len(values))
            if len(values) not in (1, count):
                got = " ".join(values or words[:1]) or "none"
                spaces = f"; separate them by spaces: {option} {got.replace(',', ' ')}" if "," in got else ""
                raise UsageError(f"{option} takes {count} numbers, or one for all; got {got}{spaces}")
            spread += [option, *values * (count if len(values) == 1 else 1)]
        else:
            spread.append(f"{option}{equals}{value}")
    return spread


def _leading(words: list[str], pattern: str, most: int | None = None) -> list[str]:
    """Remove and return the first words that match the pattern, at most `most`."""
    matching = list(takewhile(re.compile(pattern, re.IGNORECASE | re.DOTALL).fullmatch, words[:most]))
    del words[: len(matching)]
    return matching


def _too_many(source: Sequence[str], rest: Sequence[str], *, has_streams: bool) -> str:
    """Return the message for unexpected arguments; several files suggest an unquoted pattern."""
    if not source:
        return f"unexpected argument{'s' if rest[1:] else ''}: {listed(rest, _MAX_SHOWN)}"
    paths = [PurePath(path) for path in (*source, *rest)]
    folders, suffixes = {path.parent for path in paths}, {path.suffix for path in paths}
    alike = len(folders) == len(suffixes) == 1 and suffixes != {""}
    pattern = f": '{folders.pop() / ('*' + suffixes.pop())}'" if alike else ""
    streams = "; for a stream each, list them in a file (--streams)" if has_streams else ""
    return f"got {len(paths)} sources; quote the pattern{pattern}, or name the folder{streams}"
