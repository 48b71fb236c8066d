"""What makes a field of a dataclass an option of a command: its help, its names, its bounds. Imports no typer."""

from __future__ import annotations

import ast
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from remtta.errors import UsageError, check

T = TypeVar("T")
Panel = Literal["Stream", "Data", "Protocol", "Model", "Method", "Answers and guard", "Output and running"]
PANELS = get_args(Panel)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a number must be: `momentum: Annotated[float, Bounds(min=0, below=1)]`.

    Attributes:
        min: Least value.
        max: Largest value.
        above: What it must be larger than.
        below: What it must be smaller than; infinity for any finite number.
    """

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        low, high = self._ends
        return low <= value <= high and value not in (self.above, self.below)

    def __str__(self) -> str:
        low, high = self._ends
        if self.min is not None and self.max is not None:
            return f"from {low} to {high}"
        if low == -math.inf:
            return "a finite number"
        if self.max is not None or (self.below or math.inf) < math.inf:
            return f"in {'(' if self.min is None else '['}{low}, {high}{')' if self.max is None else ']'}"
        return f"{'>' if self.min is None else '>='} {low}" + (" and finite" if self.below else "")

    @property
    def _ends(self) -> tuple[float, float]:
        lows, highs = (self.min, self.above, -math.inf), (self.max, self.below, math.inf)
        low, high = (next(end for end in ends if end is not None) for ends in (lows, highs))
        return low, high


@dataclass(frozen=True)
class Option(Bounds):
    """How a field is given on the command line: `lr: Annotated[float, Option("Learning rate.", above=0)] = 1e-3`.

    Attributes:
        help: What it does, in a sentence.
        flags: Its names, the long one first; by default that of the field.
        metavar: What stands for its value.
        default: What happens where it is not given, if the field's default does not say.
        panel: Heading that `--help` lists it under.
        common: Whether `--help` shows it; `--help-all` shows every option.
        read: Reads its value from text; by default as the field's type says.
        complete: Values and what they are, for a shell to complete.
        more: A page of the documents, from docs/.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    default: str | None = None
    panel: Panel | None = None
    common: bool = False
    read: Callable[[str], object] | None = None
    complete: Mapping[str, str] | None = None
    more: str | None = None


@dataclass(frozen=True)
class Fixed:
    """Marks a field that must be the same where a run or an evaluation goes on."""


@dataclass(frozen=True)
class Only:
    """The options that a command takes of a group: `Annotated[Group, Only("a", "b", c=1)]`, some with other defaults.

    They keep the group's order. The others have the group's defaults.
    """

    names: frozenset[str]
    defaults: Mapping[str, object]

    def __init__(self, *names: str, **defaults: object) -> None:
        object.__setattr__(self, "names", frozenset((*names, *defaults)))
        object.__setattr__(self, "defaults", defaults)


@dataclass(frozen=True)
class Given:
    """Marks a mapping of the settings of a config that were given: those of its fields that are options."""

    config: type


@dataclass(frozen=True)
class Member:
    """A field of a group, or a parameter of a command.

    Attributes:
        name: Its name.
        type: Its type, without None and metadata.
        optional: Whether it may be None.
        default: Its default, or `dataclasses.MISSING`.
        metadata: What `Annotated` says.
    """

    name: str
    type: Any
    optional: bool
    default: Any
    metadata: tuple[Any, ...]

    def first(self, kind: type[T]) -> T | None:
        """The metadata of a kind, if there is some."""
        return next((each for each in self.metadata if isinstance(each, kind)), None)

    @property
    def option(self) -> Option | None:
        """How it is given on the command line, if it can be."""
        return self.first(Option)

    @property
    def is_group(self) -> bool:
        """Whether it is a dataclass of options."""
        return isinstance(self.type, type) and is_dataclass(self.type)

    @property
    def flag(self) -> str:
        """Its long name on the command line."""
        flags = self.option.flags if self.option else ()
        return flags[0].partition("/")[0] if flags else f"--{self.name.replace('_', '-')}"


_MEMBERS: dict[type, tuple[Member, ...]] = {}


def members_of(group: type) -> tuple[Member, ...]:
    """A dataclass's fields, in order."""
    if group not in _MEMBERS:
        _MEMBERS[group] = _members(group)
    return _MEMBERS[group]


def _members(group: type) -> tuple[Member, ...]:
    hints = get_type_hints(group, include_extras=True)
    return tuple(
        member_of(
            each.name, hints[each.name], each.default if each.default_factory is MISSING else each.default_factory()
        )
        for each in fields(group)
        if each.init
    )


def member_of(name: str, annotation: Any, default: Any = MISSING) -> Member:
    """A field by its annotation."""
    kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    known = [part for part in parts if part is not types.NoneType]
    inner = known[0]
    if get_origin(inner) is Annotated:
        inner, *more = get_args(inner)
        metadata += more
    return Member(name, inner, len(known) < len(parts), default, tuple(metadata))


def documented(group: type[T]) -> type[T]:
    """Add to a dataclass's docstring what its options do, for Python's `help` and the documents."""
    lines = [f"        {each.name}: {each.option.help}" for each in members_of(group) if each.option]
    group.__doc__ = "\n".join([(group.__doc__ or "").rstrip(), "", "    Attributes:", *lines, "    "])
    return group


def fixed_fields(group: type) -> dict[str, Any]:
    """Names and defaults of the fields that must be the same where a run goes on."""
    return {each.name: each.default for each in members_of(group) if each.first(Fixed)}


def check_options(group: Any) -> None:
    """Refuse values of a dataclass's fields that are out of bounds, or not among a type's literals.

    Raises:
        UsageError: Naming the first of them.
    """
    for member in members_of(type(group)):
        value, name = getattr(group, member.name), member.name
        if value is None and member.optional:
            continue
        if member.option and member.flag.removeprefix("--").replace("-", "_") != name:
            name = member.flag.removeprefix("--")  # which is what people know: lambda
        if get_origin(member.type) is Literal:
            check(value in get_args(member.type), name, value, _listed(get_args(member.type)))
        bounds = member.first(Bounds)
        for number in value if isinstance(value, tuple) else (value,):
            if bounds and isinstance(number, int | float):
                check(number in bounds, name, number, str(bounds))


def _listed(values: tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))


def read_value(member: Member, text: str) -> object:
    """A value from the text of the command line, as the member's type has it.

    Raises:
        UsageError: If it cannot be read.
    """
    assert member.option
    if member.option.read:
        return member.option.read(text)
    kind = get_args(member.type)[0]
    if kind is str:
        return tuple(read_names(text))
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers such as 1,2,3" if kind is int else "numbers such as 0,0.1,0.2"
        raise UsageError(f"{member.flag} takes {what}, got {text}") from None


def is_list(member: Member) -> bool:
    """Whether its values stand in one word with commas between them."""
    return get_origin(member.type) is tuple and get_args(member.type)[-1] is Ellipsis


def read_names(text: str) -> Iterator[str]:
    """`fog, snow` to names."""
    return (name.strip() for name in text.split(",") if name.strip())


def read_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """`img_size=32` and the like to Python values; what is no literal stays text.

    Raises:
        UsageError: If one is no pair.
    """
    read: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if option == "--set" and found and "." in key:
            raise UsageError(f"--set {pair}: there is only one method here; write {key.partition('.')[2]}={value}")
        if not found or not key.isidentifier():
            raise UsageError(f"{option} takes key=value pairs, got {pair!r}")
        try:
            read[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
            read[key] = value
    return read


def read_size(text: str) -> int:
    """Bytes from "800M", "1.5G" or a plain number of bytes; K, M, G and T are powers of 1024.

    Raises:
        UsageError: If it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") if found else math.inf
    if math.isinf(size):
        raise UsageError(f'cannot read the size "{text[:40]}"; write it as 800M or 1.5G')
    return int(size)


def read_regular(path: str | Path, most_bytes: int, what: str) -> bytes:
    """The content of a small file.

    Raises:
        UsageError: If it is not there, no regular file, too large, or cannot be read.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file, so it cannot be {what}")
        if path.stat().st_size > most_bytes:
            raise UsageError(f"{path} has {path.stat().st_size} bytes, too many for {what}")
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
