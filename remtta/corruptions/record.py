"""corrupt.json: what a tree was made from and how, so that it can be resumed and nothing unlike is mixed in."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import Any

from remtta._version import __version__
from remtta.corruptions.options import JPEG_QUALITY, CorruptOptions
from remtta.corruptions.parameters import CORRUPTIONS, PARAMETERS, SEVERITIES
from remtta.corruptions.places import Place
from remtta.errors import UsageError
from remtta.remote import Folder, Stored

RECORD = "corrupt.json"

GENERATOR = 1
"""Raised whenever the same seed and settings come to make other images."""


def settings_of(source: Folder, options: CorruptOptions) -> dict[str, Any]:
    """What all files of one tree have in common."""
    return {
        "source": str(source) if isinstance(source, Stored) else os.path.realpath(source),
        "seed": options.seed,
        "size": options.size,
        "parameters": options.parameters,
        "format": options.format,
        "jpeg_quality": JPEG_QUALITY,
        "generator": GENERATOR,
    }


def claim(destination: Place, source: Folder, options: CorruptOptions) -> dict[str, list[int]]:
    """Make a folder ready, and say so in its record.

    Args:
        destination: Root of the tree.
        source: What it is made from.
        options: How.

    Returns:
        Corruption to severities: those of the tree so far and those asked for now.

    Raises:
        UsageError: If the folder holds a tree with other settings, or corruptions made by something else.
        OutputError: If it cannot be written to.
    """
    destination.check()
    earlier = _read(destination)
    if earlier is not None and options.overwrite:
        for folder in _folders(earlier):
            destination.remove(folder)
        earlier = None
    if earlier is None:
        _refuse_strangers(destination, options)
    else:
        _refuse_other_settings(destination, earlier, settings_of(source, options))
        destination.remove_leftovers((RECORD,), _folders(earlier))
    contents = {} if earlier is None else _contents(earlier)
    for name in options.corruptions:
        contents[name] = sorted({*contents.get(name, []), *options.severities})
    contents = {name: contents[name] for name in CORRUPTIONS if name in contents}
    destination.make()
    write_record(destination, source, options, contents, {"exit_reason": "unfinished"})
    return contents


def write_record(
    destination: Place,
    source: Folder,
    options: CorruptOptions,
    contents: dict[str, list[int]],
    outcome: dict[str, Any],
) -> None:
    """Write corrupt.json.

    Args:
        destination: Root of the tree.
        source: What it is made from.
        options: How.
        contents: Corruption to severities in the tree.
        outcome: Of the latest run: exit reason, counts, what could not be read.

    Raises:
        OutputError: If the disk refuses.
    """
    corruptions = {name: {"severities": contents[name], **_parameters(name)} for name in contents}
    record = {
        "remtta": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings_of(source, options),
        "corruptions": corruptions,
        "limit": options.limit,
        **outcome,
    }
    destination.write(RECORD, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())


def _parameters(name: str) -> dict[str, Any]:
    entry = PARAMETERS[name]
    return {kind: [entry.values(severity, kind) for severity in SEVERITIES] for kind in ("imagenet", "cifar")}


def _read(destination: Place) -> dict[str, Any] | None:
    try:
        if (content := destination.read(RECORD)) is None:
            return None
        record = json.loads(content)
        _contents(record)
        if not isinstance(record["settings"], dict):
            raise TypeError("settings are no object")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{destination}/{RECORD} cannot be read as a record of remtta corrupt; choose another DST"
        ) from error
    return dict(record)


def _contents(record: dict[str, Any]) -> dict[str, list[int]]:
    """Corruption to severities; whatever else a file may claim is not believed, as folders are removed by it."""
    return {
        name: [severity for severity in SEVERITIES if severity in entry["severities"]]
        for name, entry in record["corruptions"].items()
        if name in CORRUPTIONS
    }


def _folders(record: dict[str, Any]) -> list[str]:
    """Where the images of a tree are."""
    return [f"{name}/{severity}" for name, severities in _contents(record).items() for severity in severities]


def _refuse_other_settings(destination: Place, earlier: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        before = earlier["settings"].get(name)
        if before != value:
            raise UsageError(
                f"{destination} was made with {name} {_shown(before)}, not {_shown(value)}; choose another DST, "
                "or replace it with --overwrite"
            )


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _refuse_strangers(destination: Place, options: CorruptOptions) -> None:
    for name in options.corruptions:
        if destination.has(name):
            raise UsageError(f"{destination}/{name} is there, but no {RECORD} says how it was made; choose another DST")
