"""corrupt.json: the source and settings of a tree, by which a run resumes it and refuses to mix in other images."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remtta._version import __version__
from remtta.corruptions.choices import JPEG_QUALITY, CorruptOptions, in_order
from remtta.corruptions.parameters import CORRUPTIONS, PARAMETERS, SEVERITIES, parts_of
from remtta.errors import UsageError
from remtta.files import check_can_hold, remove_leftovers, write_json, writing

RECORD = "corrupt.json"

_WRITTEN_IN_S = 60.0

GENERATOR = 1
"""Incremented whenever the same seed and settings produce different images."""


def settings_of(source: Path, options: CorruptOptions) -> dict[str, Any]:
    """Return the settings that all files of one tree share."""
    return {
        "source": os.path.realpath(source),
        "seed": options.seed,
        "size": options.size,
        "parameters": options.parameters,
        "format": options.format,
        "jpeg_quality": JPEG_QUALITY,
        "generator": GENERATOR,
    }


def claim(destination: Path, source: Path, options: CorruptOptions) -> dict[str, list[int]]:
    """Prepare the root of a tree and write its record; return its severities, so far and now, by corruption. Raise
    UsageError if the folder holds a tree with other settings, or corruptions that remtta did not make; OutputError if
    it cannot be written to.
    """
    check_can_hold(destination, "a folder", "DST")
    earlier = _read(destination)
    if earlier is not None and options.overwrite:
        _remove(destination, earlier)
        earlier = None
    if earlier is None:
        for name in options.corruptions:
            if os.path.lexists(there := destination / name):
                raise UsageError(f"{there} exists, but no {RECORD} says how it was made; choose another DST")
    else:
        _refuse_other_settings(destination, earlier, settings_of(source, options))
        _remove_leftovers(destination, earlier)
    contents = {} if earlier is None else _contents(earlier)
    for name in options.corruptions:
        contents[name] = sorted({*contents.get(name, []), *options.severities})
    contents = {name: contents[name] for name in in_order(contents)}
    with writing(destination):
        destination.mkdir(parents=True, exist_ok=True)
    write_record(destination, source, options, contents, {"exit_reason": "unfinished"})
    return contents


def _remove_leftovers(destination: Path, earlier: dict[str, Any]) -> None:
    """Remove a killed run's temporary files, unless recent: another run may be adding to the same tree."""
    remove_leftovers(destination, (RECORD,), untouched_for_s=_WRITTEN_IN_S)
    for name, severities in _contents(earlier).items():
        for severity in severities:
            for folder, _, _ in os.walk(destination / name / str(severity)):
                remove_leftovers(Path(folder), ("*.JPEG", "*.png"), untouched_for_s=_WRITTEN_IN_S)


def finish(
    destination: Path, source: Path, options: CorruptOptions, contents: dict[str, list[int]], outcome: dict[str, Any]
) -> None:
    """Write corrupt.json at the end, including what another run has added to the tree meanwhile. Raise OutputError if
    the file cannot be written; UsageError if it was replaced by something that is not a record.
    """
    others = _contents(_read(destination) or {"corruptions": {}})
    names = in_order([*contents, *others])
    both = {name: sorted({*contents.get(name, []), *others.get(name, [])}) for name in names}
    write_record(destination, source, options, both, outcome)


def write_record(
    destination: Path, source: Path, options: CorruptOptions, contents: dict[str, list[int]], outcome: dict[str, Any]
) -> None:
    """Write corrupt.json, with the tree's corruptions and severities, and the outcome of the latest run."""
    corruptions = {name: {"severities": contents[name], **_parameters(name)} for name in contents}
    record = {
        "remtta": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings_of(source, options),
        "corruptions": corruptions,
        "limit": options.limit,
        **outcome,
    }
    write_json(destination / RECORD, record)


def _parameters(name: str) -> dict[str, Any]:
    if name not in PARAMETERS:
        return {part: _parameters(part) for part in parts_of(name)}
    entry = PARAMETERS[name]
    return {kind: [entry.values(severity, kind) for severity in SEVERITIES] for kind in ("imagenet", "cifar")}


def _read(destination: Path) -> dict[str, Any] | None:
    path = destination / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _contents(record)
        if not isinstance(record["settings"], dict):
            raise TypeError("settings are no object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as a record of remtta corrupt; choose another DST") from error
    return dict(record)


def _contents(record: dict[str, Any]) -> dict[str, list[int]]:
    """Return corruption to severities; ignores unknown names, since folders are removed by what this returns."""
    return {
        name: [severity for severity in SEVERITIES if severity in entry["severities"]]
        for name, entry in record["corruptions"].items()
        if set(parts_of(name)) <= set(CORRUPTIONS)
    }


def _refuse_other_settings(destination: Path, earlier: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if (before := earlier["settings"].get(name)) != value:
            raise UsageError(
                f"{destination} was made with {name} {_shown(before)}, not {_shown(value)}; choose another DST, "
                "or replace it with --overwrite"
            )


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _remove(destination: Path, earlier: dict[str, Any]) -> None:
    with writing(destination):
        for name, severities in _contents(earlier).items():
            for severity in severities:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(destination / name / str(severity))
            with contextlib.suppress(OSError):  # keep a folder that holds other files
                (destination / name).rmdir()
