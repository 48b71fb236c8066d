from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import typer
from typer.testing import CliRunner

from remtta.cli.groups import Only, flat, options_of


@dataclass(frozen=True)
class Size:
    size: Annotated[tuple[int, int] | None, typer.Option(metavar="H W", help="The size.")] = None
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep it.")] = True


@dataclass(frozen=True)
class Names:
    names: Annotated[list[str] | None, typer.Option("--name", "-n", help="A name.")] = None
    kind: Annotated[Literal["plain", "fancy"], typer.Option(help="A kind.")] = "plain"
    loud: Annotated[bool, typer.Option("--loud", help="Be loud.")] = False


@dataclass(frozen=True)
class MoreNames(Names):
    kind: Annotated[Literal["plain"], typer.Option(help="The only kind.")] = "plain"
    most: Annotated[int, typer.Option(min=1, help="At most so many.")] = 3


@dataclass(frozen=True, kw_only=True)
class Outer:
    first: Annotated[float, typer.Option(help="The first.")] = 0.5
    size: Size
    needed: Annotated[Path, typer.Option(help="A path.")]


@pytest.fixture
def told() -> list[Any]:
    """What the command under test was called with."""
    return []


def run(command: Callable[..., None], *args: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(flat(command))
    return CliRunner().invoke(app, args, env={"COLUMNS": "100", "NO_COLOR": "1"})


def names_of(owner: Callable[..., Any]) -> list[str]:
    return [option.name for option in options_of(owner)]


def test_options_stand_where_their_groups_do() -> None:
    def command(path: Annotated[Path, typer.Argument()], outer: Outer, names: Names) -> None: ...

    assert names_of(command) == ["path", "first", "size", "keep", "needed", "names", "kind", "loud"]
    assert [option.default for option in options_of(Size)] == [None, True]
    assert get_args(options_of(command)[-2].annotation)[0] == Literal["plain", "fancy"]
    text = run(command, "--help").output
    places = [text.index(option) for option in ("--first", "--size", "--keep", "--needed", "--name", "--kind")]
    assert places == sorted(places)


def test_a_command_gets_its_groups_with_their_defaults(told: list[Any]) -> None:
    def command(path: Annotated[Path, typer.Argument()], outer: Outer, names: Names) -> None:
        """Do it."""
        told.extend((path, outer, names))

    assert run(command, "here", "--needed", "there").exit_code == 0
    assert told == [Path("here"), Outer(first=0.5, size=Size(), needed=Path("there")), Names()]


def test_repeated_options_flags_and_tuples_reach_their_fields(told: list[Any]) -> None:
    def command(size: Size, names: Names) -> None:
        told.extend((size, names))

    args = ("--no-keep", "--size", "3", "4", "-n", "a", "--name", "b", "--loud", "--kind", "fancy")
    assert run(command, *args).exit_code == 0
    assert told == [Size(size=(3, 4), keep=False), Names(names=["a", "b"], kind="fancy", loud=True)]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "Missing option '--needed'"),
        (("--needed", "x", "--size", "3"), "Option '--size' requires 2 arguments"),
        (("--needed", "x", "--first", "y"), "Invalid value for '--first'"),
    ],
)
def test_bad_values_are_usage_errors(args: tuple[str, ...], text: str) -> None:
    def command(outer: Outer) -> None: ...

    done = run(command, *args)
    assert done.exit_code == 2 and text in done.output


def test_a_group_that_builds_on_another_replaces_options_in_their_places(told: list[Any]) -> None:
    def command(names: MoreNames) -> None:
        told.append(names)

    assert names_of(command) == ["names", "kind", "loud", "most"]
    assert run(command, "--kind", "fancy").exit_code == 2
    assert run(command, "--loud").exit_code == 0
    assert told == [MoreNames(loud=True, kind="plain", most=3)]


def test_only_some_options_of_a_group_are_a_commands(told: list[Any]) -> None:
    def command(outer: Annotated[Outer, Only("needed", "size", first=2.5)]) -> None:
        told.append(outer)

    assert names_of(command) == ["first", "size", "needed"]
    assert "[default: 2.5]" in run(command, "--help").output
    assert run(command, "--needed", "x", "--no-keep").exit_code == 2
    assert run(command, "--needed", "x", "--size", "1", "2").exit_code == 0
    assert told == [Outer(first=2.5, size=Size(size=(1, 2)), needed=Path("x"))]
    assert options_of(Outer)[0].default == 0.5


def test_an_option_of_a_command_is_not_that_of_a_group_which_it_leaves_out(told: list[Any]) -> None:
    def command(size: Size, outer: Annotated[Outer, Only("needed")]) -> None:
        told.extend((size, outer))

    assert run(command, "--needed", "x", "--size", "1", "2").exit_code == 0
    assert told == [Size(size=(1, 2)), Outer(size=Size(), needed=Path("x"))]


def test_wrong_groups_are_refused_before_anything_runs() -> None:
    def unknown(size: Annotated[Size, Only("size", "depth")]) -> None: ...
    def twice(size: Size, outer: Outer) -> None: ...

    with pytest.raises(TypeError, match="no options of the group: depth"):
        flat(unknown)
    with pytest.raises(ValueError, match="duplicate parameter name: 'size'"):
        flat(twice)


def test_a_flat_command_keeps_its_name_and_its_words() -> None:
    def command(size: Size) -> None:
        """Do it."""

    assert (flat(command).__name__, flat(command).__doc__) == ("command", "Do it.")
