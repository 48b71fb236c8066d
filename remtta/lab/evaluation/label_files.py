"""Read files that give images their classes, as people and programs write them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from remtta.errors import UsageError
from remtta.files import read_text

Pair = tuple[str, str]

_SHOWN = 80  # characters of a line in an error
_DELIMITERS = "\t,; "
_WHOLE = re.compile(r"(\d+)(\.0*)?")
_NUMBER = re.compile(r"\d+|n\d{8}")  # a class's number or wnid, which a space may separate from the item
_CLASS_COLUMN = re.compile(r"(true|image|img)?(class|label|category|target)(id|index|number|name)?")


def read_label_file(file: Path, option: str, is_item: Callable[[str], bool], *, partial: bool = False) -> list[Pair]:
    """Return the item, such as a path, and the class of each line of a file.

    Between them is a tab, comma, semicolon or, before a number or wnid, a space; the class may come first. There may be
    quotes, as in CSV, and a header, whose column named class or label then counts, whatever the others.

    Args:
        option: The option that names the file, for errors.
        is_item: Whether a text is an item, not a class.
        partial: Whether items may be unknown, and classes missing, for which "" is returned.

    Raises:
        UsageError: If the file cannot be read, a line does not have both, or an item has two classes.
    """
    text = read_text(file, option, "surrogateescape")
    if "\0" in text:
        raise UsageError(f"{option}: {file} is not a text file; give a TSV or CSV of paths and classes, in UTF-8")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    header = _header(lines[0]) if lines and not any(is_item(item) for item, _ in _ways(lines[0])) else None
    pairs: list[Pair] = []
    for line in lines[header is not None :] or [""]:
        beside = list(_ways_beside(line, header, partial)) if header and (header.columns > 2 or partial) else []
        ways = beside if header and header.columns > 2 else [*beside, *_ways(line, partial)]
        if not ways:
            raise UsageError(f'{option}: {file} needs lines such as frames/1.png,3, got "{line:.{_SHOWN}}"')
        pairs.append(next((way for way in ways if is_item(way[0])), ways[0]))
    if header is None and not partial and len(pairs) > 1 and [is_item(item) for item, _ in pairs[:2]] == [False, True]:
        raise UsageError(
            f'{option}: {file} begins with "{lines[0]:.{_SHOWN}}", which names no image; if it is a header, call the '
            "column of classes class or label"
        )
    last_class = {item: name for item, name in pairs if name}
    if repeated := next((item for item, name in pairs if name and last_class[item] != name), None):
        raise UsageError(f"{option}: {file} lists {repeated} with two classes")
    return pairs


def whole_number(text: str) -> int | None:
    """Return the number that a text is, also as pandas writes it in columns with missing values: 3.0."""
    return int(number[1]) if (number := _WHOLE.fullmatch(text)) else None


def _ways(line: str, partial: bool = False) -> Iterator[Pair]:
    """Yield item and class for each way to read a line without a header, the usual one first."""
    for delimiter in _DELIMITERS:
        fields = _fields(line, delimiter)
        for count in range(1, len(fields)):  # either may contain the delimiter
            first, second = (delimiter.join(part).strip() for part in (fields[:count], fields[count:]))
            for item, name in ((first, second), (second, first)):
                if item and (name or partial) and (delimiter != " " or _NUMBER.fullmatch(name)):
                    yield item, name
    if partial:
        yield ",".join(_fields(line, ",")), ""  # without its quotes


class _Header(NamedTuple):
    delimiter: str
    columns: int
    place: int  # of the classes


def _header(line: str) -> _Header | None:
    """Return what a header tells; None if the line is none."""
    for delimiter in _DELIMITERS:
        names = [re.sub(r"[\W_]", "", name.casefold()) for name in _fields(line, delimiter)]
        if len(names) > 1 and (found := [place for place, name in enumerate(names) if _CLASS_COLUMN.fullmatch(name)]):
            return _Header(delimiter, len(names), found[0])
    return None


def _ways_beside(line: str, header: _Header, partial: bool) -> Iterator[Pair]:
    """Yield each field of a line with the one in the column of classes."""
    fields = [field.strip() for field in _fields(line, header.delimiter)]
    name = fields.pop(header.place) if header.place < len(fields) else ""
    yield from ((item, name) for item in fields if item and (name or partial))


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter))
    except csv.Error:  # longer than any name
        return [line]
