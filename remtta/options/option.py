"""Metadata that makes a field of a dataclass an option of a command: help, names, bounds. Imports no typer."""

from __future__ import annotations

import ast
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from remtta.errors import UsageError, check

T = TypeVar("T")
Panel = Literal["Stream", "Data", "Protocol", "Model", "Method", "Answers and guard", "Output and running"]
PANELS = get_args(Panel)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number: `momentum: Annotated[float, Bounds(min=0, below=1)]`; `above` and `below` are exclusive, and
    `below` infinity allows any finite number.
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
    """Make a field a command-line option: `lr: Annotated[float, Option("Learning rate.", above=0)] = 1e-3`."""

    help: str | Callable[[], str]
    flags: tuple[str, ...] = ()  # the long one first; by default derived from the field's name
    metavar: str | None = None
    default: str | None = None  # what happens by default, if the field's default does not say so
    panel: Panel | None = None  # heading under which `--help` lists it
    common: bool = False  # whether `--help` shows it; `--help-all` shows every option
    read: Callable[[str], object] | None = None  # parses its value; by default according to the field's type
    complete: Mapping[str, str] | None = None  # values with descriptions, for shell completion
    more: str | None = None  # a page of the documentation, relative to docs/

    @property
    def text(self) -> str:
        """The help; a function of it is called only now, as it may import the extensions that it names."""
        return self.help if isinstance(self.help, str) else self.help()


# Options by the heading under which `--help` lists them.
stream_option = partial(Option, panel="Stream")
data_option = partial(Option, panel="Data")
protocol_option = partial(Option, panel="Protocol")
model_option = partial(Option, panel="Model")
method_option = partial(Option, panel="Method")
prediction_option = partial(Option, panel="Answers and guard")
output_option = partial(Option, panel="Output and running")
output_folder = partial(
    output_option,
    "Folder for the results.",
    flags=("--output", "-o"),
    metavar="DIR",
    default="runs/<UTC time>",
    common=True,
)


class Fixed:
    """Marks a field that must not change when a run or an evaluation resumes."""


class Subset:
    """The options that a command takes from a group, some with other defaults: `Annotated[Group, Subset("a", c=1)]`.

    They keep the group's order. All other fields have the group's defaults.
    """

    def __init__(self, *names: str, **defaults: object) -> None:
        self.names, self.defaults = frozenset((*names, *defaults)), defaults


@dataclass(frozen=True)
class PassedSettings:
    """Marks a mapping that holds the settings of a config that the user passed, by the names of its options."""

    config: type | Callable[[], type]


@dataclass(frozen=True)
class OptionGroups:
    """Marks a mapping that holds groups of options by name: of extensions, which are found on use."""

    find: Callable[[], Mapping[str, type]]


@dataclass(frozen=True)
class OptionField:
    """A field of a dataclass of options, or a parameter of a command."""

    name: str
    type: Any  # without None and metadata
    optional: bool  # whether it may be None
    default: object  # `dataclasses.MISSING` if it is required
    metadata: tuple[object, ...]  # of `Annotated`
    command_default: object  # replaces `default` in one command; `MISSING` if it does not

    def first(self, metadata_type: type[T]) -> T | None:
        """Return the first metadata of a class, or None."""
        return next((item for item in self.metadata if isinstance(item, metadata_type)), None)

    @property
    def option(self) -> Option | None:
        """The option metadata, if it is an option."""
        return self.first(Option)

    @property
    def is_group(self) -> bool:
        """True if it is a dataclass of options."""
        return isinstance(self.type, type) and is_dataclass(self.type)

    @property
    def is_list(self) -> bool:
        """True if its values are passed as one comma-separated word."""
        return get_origin(self.type) is tuple and get_args(self.type)[-1] is Ellipsis

    @property
    def flag(self) -> str:
        """Its long name on the command line."""
        flags = self.option.flags if self.option else ()
        return flags[0].partition("/")[0] if flags else f"--{self.name.replace('_', '-')}"


_FIELDS: dict[type, tuple[OptionField, ...]] = {}  # by dataclass, as resolving annotations takes a third of `--help`


def option_fields(group: type) -> tuple[OptionField, ...]:
    """Return a dataclass's fields, in order."""
    if group not in _FIELDS:
        hints = get_type_hints(group, include_extras=True)
        _FIELDS[group] = tuple(
            option_field(
                item.name, hints[item.name], item.default if item.default_factory is MISSING else item.default_factory()
            )
            for item in fields(group)
            if item.init
        )
    return _FIELDS[group]


def option_field(name: str, annotation: object, default: object = MISSING) -> OptionField:
    """Return the field for an annotation, such as `Annotated[int | None, Option("Seed.")]`."""
    annotated, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    alternatives = get_args(annotated) if get_origin(annotated) in (Union, types.UnionType) else (annotated,)
    value_type = next(alternative for alternative in alternatives if alternative is not types.NoneType)
    if get_origin(value_type) is Annotated:
        value_type, *more = get_args(value_type)
        metadata += more
    return OptionField(name, value_type, types.NoneType in alternatives, default, tuple(metadata), MISSING)


def documented(group: type[T]) -> type[T]:
    """Add the help of a dataclass's options to its docstring, for Python's `help` and the documentation."""
    doc = (group.__doc__ or "").rstrip()
    lines = [f"        {field.name}: {field.option.text}" for field in option_fields(group) if field.option]
    head = [] if "Attributes:" in doc else ["", "    Attributes:"]
    group.__doc__ = "\n".join([doc, *head, *lines, "    "])
    return group


def fixed_fields(group: type) -> dict[str, object]:
    """Return the names and defaults of the fields that must not change when a run resumes."""
    return {field.name: field.default for field in option_fields(group) if field.first(Fixed)}


def check_options(options: object) -> None:
    """Raise UsageError if a field of a dataclass is not a number, out of bounds, or not among its type's literals."""
    for field in option_fields(type(options)):
        value, name = getattr(options, field.name), field.name
        if value is None and field.optional:
            continue
        if field.option and field.flag.removeprefix("--").replace("-", "_") != name:
            name = field.flag.removeprefix("--")  # the name that users know: lambda
        if get_origin(field.type) is Literal:
            *others, last = get_args(field.type)
            check(value in (*others, last), name, value, f"{', '.join(others)} or {last}" if others else last)
        if field.type in (int, float):
            check_number(field, name, value)
            object.__setattr__(options, field.name, plain_number(value))
        bounds = field.first(Bounds)
        for number in value if isinstance(value, tuple) else (value,):
            if bounds and isinstance(number, int | float):
                check(number in bounds, name, number, str(bounds))


def check_number(field: OptionField, name: str, value: object) -> None:
    """Raise UsageError if a value does not have the numeric type of a field."""
    whole = field.type is int
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    check(is_number, name, value, f"a {'whole ' if whole else ''}number{' or None' if field.optional else ''}")


def plain_number(value: Any) -> Any:
    """Return a number of NumPy as Python's, and any other value as it is."""
    if isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def read_value(field: OptionField, text: str) -> object:
    """Parse a value of the command line according to its field; raise UsageError if that is impossible."""
    if field.option and field.option.read:
        return field.option.read(text)
    item_type = get_args(field.type)[0]
    if item_type is str:
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        return tuple(item_type(part) for part in text.split(","))
    except ValueError:
        expected = "whole numbers such as 1,2,3" if item_type is int else "numbers such as 0,0.1,0.2"
        raise UsageError(f"{field.flag} takes {expected}, got {text}") from None


def read_pairs(pairs: Sequence[str], option: str) -> dict[str, object]:
    """Parse `img_size=32` and the like to Python values, or else strings; raise UsageError for other forms."""
    read: dict[str, object] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if option == "--set" and found and "." in key:
            raise UsageError(f"--set {pair}: there is only one method here; write {key.partition('.')[2]}={value}")
        if not found or not key.isidentifier():
            hint = f"; write {key.replace('-', '_')}={value}" if found and "-" in key else ""
            raise UsageError(f"{option} takes key=value pairs, got {pair!r}{hint}")
        try:
            read[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
            read[key] = value
    return read


def read_size(text: str) -> int:
    """Return the bytes of "800M", "1.5G" or a number (K, M, G, T: powers of 1024); raise UsageError for others."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") if found else math.inf
    if math.isinf(size):
        raise UsageError(f'cannot read the size "{text[:40]}"; write it as 800M or 1.5G')
    return int(size)
