"""Commands made from dataclasses of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from remtta.cli.groups import flat
from remtta.errors import UsageError
from remtta.options.option import Fixed, Given, Only, Option, check_options, fixed_fields, read_size


@dataclass(frozen=True)
class Size:
    size: Annotated[tuple[int, int] | None, Option("The size.", metavar="H W")] = None
    keep: Annotated[bool, Option("Keep it.", flags=("--keep/--no-keep",)), Fixed()] = True
    hidden: int = 7


@dataclass(frozen=True)
class Names:
    names: Annotated[Sequence[str], Option("A name.", flags=("--name", "-n"))] = ()
    kind: Annotated[Literal["plain", "fancy"], Option("A kind.")] = "plain"
    loud: Annotated[bool, Option("Be loud.")] = False
    ratios: Annotated[tuple[float, ...], Option("Ratios.", min=0, default="0,1")] = (0.0, 1.0)
    words: Annotated[tuple[str, ...] | None, Option("Words.")] = None
    pairs: Annotated[Mapping[str, Any], Option("Pairs.")] = field(default_factory=dict)
    most: Annotated[int | None, Option("Bytes.", read=read_size)] = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Config:
    rate: Annotated[float, Option("The rate.", default="0.1")] = 0.1
    steps: Annotated[int, Option("Steps.", flags=("--num-steps",), min=1, default="1")] = 1


NO_SIZE = Size()


@dataclass(frozen=True, kw_only=True)
class Outer:
    first: Annotated[float, Option("The first.", above=0)] = 0.5
    size: Size = NO_SIZE
    needed: Annotated[Path, Option("A path.")]
    given: Annotated[Mapping[str, object], Given(Config)] = field(default_factory=dict)


@pytest.fixture
def told() -> list[Any]:
    """Return the arguments with which the command under test was called."""
    return []


def run(command: Callable[..., None], *args: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(flat(command))
    return CliRunner().invoke(app, args, env={"COLUMNS": "100", "NO_COLOR": "1"})


def names_of(command: Callable[..., None]) -> list[str]:
    return list(flat(command).members)  # type: ignore[attr-defined]


def test_options_are_in_the_order_of_their_groups() -> None:
    def command(path: Annotated[Path, typer.Argument()], outer: Outer, names: Names) -> None: ...

    inner = ["first", "size", "keep", "needed", "rate", "steps"]
    assert names_of(command) == ["path", *inner, "names", "kind", "loud", "ratios", "words", "pairs", "most"]
    text = run(command, "--help").output
    places = [text.index(option) for option in ("--first", "--size", "--keep", "--needed", "--num-steps", "--name")]
    assert places == sorted(places)
    assert "[default: (0,1)]" in text and "[default: 0.5]" in text


def test_defaults_are_those_of_the_dataclass(told: list[Any]) -> None:
    def command(path: Annotated[Path, typer.Argument()], outer: Outer, names: Names) -> None:
        """Do it."""
        told.extend((path, outer, names))

    assert run(command, "here", "--needed", "there").exit_code == 0
    assert told == [Path("here"), Outer(needed=Path("there")), Names()]


def test_values_reach_their_fields_as_their_types_have_them(told: list[Any]) -> None:
    def command(outer: Outer, names: Names) -> None:
        told.extend((outer, names))

    args = ("--no-keep", "--size", "3", "4", "-n", "a", "--name", "b", "--loud", "--kind", "fancy", "--needed", "x")
    more = ("--ratios", "0,0.5", "--words", "a, b", "--pairs", "a=1", "--pairs", "b=c", "--most", "2K", "--rate", "3")
    assert run(command, *args, *more).exit_code == 0
    assert told == [
        Outer(size=Size((3, 4), keep=False), needed=Path("x"), given={"rate": 3.0}),
        Names(("a", "b"), "fancy", True, (0.0, 0.5), ("a", "b"), {"a": 1, "b": "c"}, 2048),
    ]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "Missing option '--needed'"),
        (("--needed", "x", "--size", "3"), "Option '--size' requires 2 arguments"),
        (("--needed", "x", "--first", "y"), "Invalid value for '--first'"),
        (("--needed", "x", "--num-steps", "0"), "Invalid value for '--num-steps'"),
    ],
)
def test_bad_values_are_usage_errors(args: tuple[str, ...], text: str) -> None:
    def command(outer: Outer) -> None: ...

    done = run(command, *args)
    assert done.exit_code == 2 and text in done.output


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--ratios", "a"), "--ratios takes numbers such as 0,0.1,0.2, got a"),
        (("--ratios", "0,-1"), "ratios must be >= 0, got -1.0"),
        (("--most", "much"), 'cannot read the size "much"'),
        (("--pairs", "a"), "--pairs takes key=value pairs, got 'a'"),
    ],
)
def test_values_out_of_bounds_are_refused(args: tuple[str, ...], text: str) -> None:
    def command(names: Names) -> None: ...

    done = run(command, *args)
    assert isinstance(done.exception, UsageError) and text in str(done.exception)


def test_bounds_and_choices_hold_in_python_too() -> None:
    with pytest.raises(UsageError, match="kind must be plain or fancy, got odd"):
        Names(kind="odd")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ratios must be >= 0, got -1"):
        Names(ratios=(-1.0,))
    assert fixed_fields(Size) == {"keep": True}


def test_only_some_options_of_a_group_are_a_commands(told: list[Any]) -> None:
    def command(outer: Annotated[Outer, Only("needed", "size", first=2.5)]) -> None:
        told.append(outer)

    assert names_of(command) == ["first", "size", "needed"]
    assert "[default: 2.5]" in run(command, "--help").output
    assert run(command, "--needed", "x", "--no-keep").exit_code == 2
    assert run(command, "--needed", "x", "--size", "1", "2").exit_code == 0
    assert told == [Outer(first=2.5, size=Size(size=(1, 2)), needed=Path("x"))]


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
