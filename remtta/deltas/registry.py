"""Numbered deltas in a folder or a store, each there as a whole or not at all, none ever replaced; imports no torch.

`FOLDER@3` is its third version, `FOLDER` or `FOLDER@latest` the newest one. Whoever goes back pushes an old one again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from remtta.deltas import DELTA
from remtta.deltas.reading import arrays_of, read_content
from remtta.deltas.stores import Folder, Place, Version, place_of
from remtta.errors import DeltaError, UsageError, without_password
from remtta.files import write_atomically


def push(source: str | Path, address: str | Path) -> str:
    """Add a delta to a folder, made if need be, or a store, as its newest version.

    Args:
        source: A delta file, a run's folder, or the address of a version.
        address: The folder, or an address with "://" that fsspec knows.

    Returns:
        The version: its number and, in a store, its hash, as another pushed at the same time has the same number.

    Raises:
        UsageError: If there is no such delta, or the address names a version.
        DeltaError: If it is damaged, or of another base than the newest whole one there.
        DownloadError, OutputError: If disk or store refuse; nothing is added then.
    """
    folder, version = _parts(address)
    if version is not None:
        shown = without_password(str(address))
        raise UsageError(f"{shown} names a version; a push makes a new one, so name the folder alone")
    content, fields = _source(source)
    place = place_of(folder)
    _check_same_base(place, fields)
    return str(place.add(content))


def pull(address: str | Path, target: Path) -> str:
    """Copy a version of a delta from a folder or store, byte for byte; returns which.

    Raises:
        UsageError: If there is no such version.
        DeltaError: If it is damaged.
        DownloadError, OutputError: If store or disk refuse; a file that stood there is untouched.
    """
    place, version = _version(address)
    content, _ = _checked(place, version)
    write_atomically(target, lambda temporary: temporary.write_bytes(content))
    return str(version)


def history(address: str | Path) -> list[dict[str, Any]]:
    """Every version somewhere, the newest first: its number, hash and what its header says, or what is wrong.

    "pushed" is when its file was written, which a copy of the folder may have lost, and None where a store does not
    tell.

    Raises:
        UsageError: If it holds none.
        DownloadError: If the store refuses.
    """
    place = place_of(address)
    return [_entry(place, version) for version in reversed(_some_versions(place))]


def has_versions(folder: Path) -> bool:
    """Whether a folder holds versions of a delta."""
    return bool(Folder(folder).versions())


def _entry(place: Place, version: Version) -> dict[str, Any]:
    try:
        content, fields = _checked(place, version)
    except DeltaError as error:
        return {"version": version.number, "error": str(error)}
    names = ("base_sha256", "method", "updates", "frames", "created", "lineage")
    pushed = place.pushed(version)
    return {
        "version": version.number,
        "pushed": pushed and pushed.isoformat(timespec="seconds"),
        "file_sha256": hashlib.sha256(content).hexdigest(),
        **{name: fields[name] for name in names},
    }


def _checked(place: Place, version: Version) -> tuple[bytes, dict[str, Any]]:
    """A delta's bytes and fields, of a version that is whole."""
    content = place.read(version)
    fields, _ = arrays_of(content, f"{place.shown}/{version.name}")
    return content, fields


def _source(source: str | Path) -> tuple[bytes, dict[str, Any]]:
    path = Path(source)
    if "://" in str(source) or ("@" in path.name and not path.exists()):
        return _checked(*_version(source))
    path = path / DELTA if path.is_dir() else path
    content = read_content(path)
    fields, _ = arrays_of(content, path)
    return content, fields


def _parts(address: str | Path) -> tuple[str, str | None]:
    """The folder, and the version that an address names, if it does."""
    folder = str(address) if "://" in str(address) else Path(address).as_posix()
    above, slash, name = folder.rstrip("/").rpartition("/")
    if "@" not in name or above.endswith(":/"):  # what follows :// is a host, and its user
        return folder, None
    name, _, version = name.rpartition("@")
    return above + slash + name, version


def _version(address: str | Path) -> tuple[Place, Version]:
    """The place and the version that an address means."""
    folder, wanted = _parts(address)
    place = place_of(folder)
    versions = _some_versions(place)
    if wanted in (None, "latest"):
        return place, versions[-1]
    number, _, digest = str(wanted).partition("-")
    found = [each for each in versions if number.isdecimal() and each.number == int(number)]
    found = [each for each in found if digest in ("", each.digest)]
    if len(found) > 1:
        names = " and ".join(f"@{each}" for each in found)
        raise UsageError(f"{place.shown}@{wanted} was pushed {len(found)} times at once; choose among {names}")
    if not found:
        newest = versions[-1].number
        raise UsageError(f'{place.shown} has no version "{wanted}"; it has 1 to {newest}, and latest')
    return place, found[0]


def _some_versions(place: Place) -> list[Version]:
    versions = place.versions()
    if not versions:
        raise UsageError(f"{place.shown} holds no versions of a delta; remtta delta push adds one")
    return versions


def _check_same_base(place: Place, fields: dict[str, Any]) -> None:
    for version in reversed(place.versions()):
        try:
            _, newest = _checked(place, version)
        except DeltaError:  # damage must not keep anybody from going back
            continue
        if newest["base_sha256"] != fields["base_sha256"]:
            raise DeltaError(
                f"{place.shown} holds deltas of other weights (base {newest['base_sha256'][:12]}..., this one's is "
                f"{fields['base_sha256'][:12]}...); push it to a folder of its own"
            )
        return
