"""A folder of numbered deltas, each there as a whole or not at all, none ever replaced; imports no torch.

`FOLDER@3` is its third version, `FOLDER` or `FOLDER@latest` the newest one. Whoever goes back pushes an old one again.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remtta.deltas import DELTA
from remtta.deltas.reading import read_arrays
from remtta.errors import DeltaError, UsageError
from remtta.files import check_can_hold, remove_leftovers, write_atomically, write_new, writing

_NAME = re.compile(r"(\d{4,})\.safetensors")


def push(source: Path, address: Path) -> int:
    """Add a delta to a folder, made if need be, as its newest version.

    Args:
        source: A delta file, a run's folder, or the address of a version.
        address: The folder.

    Returns:
        The version's number.

    Raises:
        UsageError: If there is no such delta, or the address names a version.
        DeltaError: If it is damaged, or of another base than the newest one there.
        OutputError: If the disk refuses; nothing is added then.
    """
    if "@" in address.name:
        raise UsageError(f"{address} names a version; a push makes a new one, so name the folder alone")
    content, fields = _checked(_file_of(source))
    check_can_hold(address, "a folder of deltas", "one")
    with writing(address):
        address.mkdir(parents=True, exist_ok=True)
    remove_leftovers(address, ("*.safetensors",))
    newest = max(_versions(address), default=0)
    if newest:
        _check_same_base(address, _checked(_path(address, newest))[1], fields)
    number = newest + 1
    while not write_new(_path(address, number), content):  # another push was first
        number += 1
    return number


def pull(address: Path, target: Path) -> int:
    """Copy a version of a delta from a folder, byte for byte; returns its number.

    Raises:
        UsageError: If there is no such version.
        DeltaError: If it is damaged.
        OutputError: If the disk refuses; a file that stood there is untouched.
    """
    folder, number = _version(address)
    content, _ = _checked(_path(folder, number))
    write_atomically(target, lambda temporary: temporary.write_bytes(content))
    return number


def history(folder: Path) -> list[dict[str, Any]]:
    """Every version in a folder, the newest first: its number, hash and what its header says, or what is wrong.

    "pushed" is when its file was written, which a copy of the folder may have lost.

    Raises:
        UsageError: If it holds none.
    """
    versions = sorted(_versions(folder), reverse=True)
    if not versions:
        raise UsageError(f"{folder} holds no versions of a delta; remtta delta push adds one")
    return [_entry(folder, number) for number in versions]


def has_versions(folder: Path) -> bool:
    """Whether a folder holds versions of a delta."""
    return bool(_versions(folder))


def _entry(folder: Path, number: int) -> dict[str, Any]:
    try:
        content, fields = _checked(_path(folder, number))
    except DeltaError as error:
        return {"version": number, "error": str(error)}
    names = ("base_sha256", "method", "updates", "frames", "created", "lineage")
    pushed = datetime.fromtimestamp(_path(folder, number).stat().st_mtime, UTC)
    return {
        "version": number,
        "pushed": pushed.isoformat(timespec="seconds"),
        "file_sha256": hashlib.sha256(content).hexdigest(),
        **{name: fields[name] for name in names},
    }


def _checked(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A delta's bytes and fields, of a file that is whole."""
    fields, _ = read_arrays(path)
    return path.read_bytes(), fields


def _file_of(source: Path) -> Path:
    if source.is_dir():
        return source / DELTA
    return source if source.exists() or "@" not in source.name else _path(*_version(source))


def _version(address: Path) -> tuple[Path, int]:
    """The folder and the number that an address means."""
    name, _, version = address.name.rpartition("@") if "@" in address.name else (address.name, "", "latest")
    folder = address.with_name(name)
    versions = _versions(folder)
    if not versions:
        raise UsageError(f"{folder} holds no versions of a delta; remtta delta push adds one")
    number = max(versions) if version == "latest" else int(version) if version.isdecimal() else 0
    if number not in versions:
        raise UsageError(f'{folder} has no version "{version}"; it has 1 to {max(versions)}, and latest')
    return folder, number


def _versions(folder: Path) -> set[int]:
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return {int(name[1]) for name in found if name}


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.safetensors"


def _check_same_base(folder: Path, newest: dict[str, Any], fields: dict[str, Any]) -> None:
    if newest["base_sha256"] != fields["base_sha256"]:
        raise DeltaError(
            f"{folder} holds deltas of other weights (base {newest['base_sha256'][:12]}..., this one's is "
            f"{fields['base_sha256'][:12]}...); push it to a folder of its own"
        )
