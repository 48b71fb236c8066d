"""corrupt.json: the source and settings of a tree, by which a run resumes it and refuses to mix in other images."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from remtta._version import __version__
from remtta.corruptions.options import JPEG_QUALITY, CorruptOptions, in_standard_order
from remtta.corruptions.parameters import CORRUPTIONS, PARAMETERS, SEVERITIES, parts_of
from remtta.errors import UsageError
from remtta.files import check_can_hold, remove_leftovers, write_json, writing

MANIFEST = "corrupt.json"

GENERATOR = 1
"""Incremented whenever the same seed and settings produce different images."""

_LEFTOVER_AFTER_S = 60.0


class _Corruption(TypedDict):
    severities: list[int]


class _Manifest(TypedDict):
    settings: dict[str, object]
    corruptions: dict[str, _Corruption]


class TreeManifest:
    """The manifest of a tree that a run with these options creates or extends."""

    def __init__(self, destination: Path, source: Path, options: CorruptOptions) -> None:
        self._destination, self._options = destination, options
        self._settings = {
            "source": os.path.realpath(source),
            "seed": options.seed,
            "size": options.size,
            "parameters": options.parameters,
            "format": options.format,
            "jpeg_quality": JPEG_QUALITY,
            "generator": GENERATOR,
        }

    def create(self) -> None:
        """Prepare the root of the tree, and write the manifest. Raise UsageError if the folder holds a tree with other
        settings, or corruptions that remtta did not make; OutputError if it cannot be written to.
        """
        destination, options = self._destination, self._options
        check_can_hold(destination, "a folder", "DST")
        earlier = _read(destination)
        if earlier is not None and options.overwrite:
            _remove_tree(destination, _severities_in(earlier))
            earlier = None
        if earlier is None:
            for name in options.corruptions:
                if os.path.lexists(folder := destination / name):
                    raise UsageError(f"{folder} exists, but no {MANIFEST} says how it was made; choose another DST")
        else:
            self._refuse_other_settings(earlier["settings"])
            _remove_leftovers(destination, _severities_in(earlier))
        with writing(destination):
            destination.mkdir(parents=True, exist_ok=True)
        self.write({"exit_reason": "unfinished"})

    def write(self, outcome: Mapping[str, object]) -> None:
        """Write the manifest with the outcome of the run, and with what other runs have added to the tree. Raise
        OutputError if it cannot be written; UsageError if it was replaced by something that is not a manifest.
        """
        current, options = _read(self._destination), self._options
        severities = {} if current is None else _severities_in(current)
        for name in options.corruptions:
            severities[name] = sorted({*severities.get(name, ()), *options.severities})
        content = {
            "remtta": __version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": self._settings,
            "corruptions": {
                name: {"severities": severities[name], **_parameters(name)} for name in in_standard_order(severities)
            },
            "limit": options.limit,
            **outcome,
        }
        write_json(self._destination / MANIFEST, content)

    def _refuse_other_settings(self, earlier: Mapping[str, object]) -> None:
        for name, value in self._settings.items():
            if (before := earlier.get(name)) != value:
                shown, now = ("none" if setting is None else setting for setting in (before, value))
                raise UsageError(
                    f"{self._destination} was made with {name} {shown}, not {now}; choose another DST, "
                    "or replace it with --overwrite"
                )


def _parameters(name: str) -> dict[str, object]:
    if name not in PARAMETERS:
        return {part: _parameters(part) for part in parts_of(name)}
    values = PARAMETERS[name].values
    return {chosen: [values(severity, chosen) for severity in SEVERITIES] for chosen in ("imagenet", "cifar")}


def _read(destination: Path) -> _Manifest | None:
    path = destination / MANIFEST
    try:
        manifest: _Manifest = json.loads(path.read_text(encoding="utf-8"))
        _severities_in(manifest)
        if not isinstance(manifest["settings"], dict):
            raise TypeError("settings are no object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as a record of remtta corrupt; choose another DST") from error
    return manifest


def _severities_in(manifest: _Manifest) -> dict[str, list[int]]:
    """Return severities by corruption, without unknown ones: folders are removed by what this returns."""
    return {
        name: [severity for severity in SEVERITIES if severity in entry["severities"]]
        for name, entry in manifest["corruptions"].items()
        if set(parts_of(name)) <= set(CORRUPTIONS)
    }


def _remove_tree(destination: Path, severities: Mapping[str, Sequence[int]]) -> None:
    with writing(destination):
        for name in severities:
            for severity in severities[name]:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(destination / name / str(severity))
            with contextlib.suppress(OSError):  # keep a folder that holds other files
                (destination / name).rmdir()
        (destination / MANIFEST).unlink()


def _remove_leftovers(destination: Path, severities: Mapping[str, Sequence[int]]) -> None:
    """Remove a killed run's temporary files, unless recent: another run may be adding to the same tree."""
    remove_leftovers(destination, (MANIFEST,), untouched_for_s=_LEFTOVER_AFTER_S)
    for name in severities:
        for severity in severities[name]:
            for folder, _, _ in os.walk(destination / name / str(severity)):
                remove_leftovers(Path(folder), ("*.JPEG", "*.png"), untouched_for_s=_LEFTOVER_AFTER_S)
