"""List files in natural order, without what systems leave beside pictures."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from remtta.errors import UsageError
from remtta.files import MANIFEST
from remtta.options.run_options import Sort
from remtta.streams.images import has_suffix

_CLUTTER = {"__macosx", "@eadir", "thumbs.db", "desktop.ini", "#recycle", "@recycle", "$recycle.bin", "lost+found"}

_log = logging.getLogger(__name__)


def is_clutter(name: str) -> bool:
    """Return True for names of files and folders that systems leave beside pictures, and that are never images of the
    user: hidden ones, such as the `._x.jpg` of macOS, thumbnails, and bins.
    """
    return name.startswith(".") or name.lower() in _CLUTTER


def natural_key(path: str) -> tuple[list[list[str | int]], str]:
    """Return a sort key that puts frame_2 before frame_10, folder by folder."""
    parts: list[list[str | int]] = [
        # Only ASCII digits become numbers, matching the split: text and numbers must alternate to compare.
        [int(part) if position % 2 else part.casefold() for position, part in enumerate(re.split(r"([0-9]+)", name))]
        for name in path.split(os.sep)
    ]
    return parts, path


def list_files(folder: Path, suffixes: Collection[str], sort: Sort, ignored: Counter[str] | None = None) -> list[Path]:
    """List the regular files under a folder with one of these lower-case suffixes, recursively.

    Linked folders are followed, once. Named pipes, sockets and devices are skipped, so nothing can hang; so is what
    `is_clutter` names. Raise UsageError if the folder itself cannot be read. The other files are counted in `ignored`,
    by suffix, or as "hidden", "no file" or "unreadable folder", except the record of `remtta corrupt`.
    """
    found: list[Path] = []
    ignored = Counter() if ignored is None else ignored

    def report(error: OSError) -> None:
        if error.filename == str(folder):
            raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
        _log.warning("skipping the folder %s: %s", error.filename, error.strerror)
        ignored["unreadable folder"] += 1

    visited = {os.path.realpath(folder)}
    for root, subfolders, names in os.walk(folder, onerror=report, followlinks=True):
        for name in names:
            path = Path(root, name)
            if name == MANIFEST:
                continue
            if is_clutter(name):
                ignored["hidden"] += 1
            elif not has_suffix(name, suffixes):
                ignored[path.suffix.lower() or "no ending"] += 1
            elif not path.is_file():
                ignored["no file"] += 1
            else:
                found.append(path)
        for name in sorted(subfolders):
            real_path = os.path.realpath(os.path.join(root, name))
            if is_clutter(name):
                ignored["hidden"] += 1
            if is_clutter(name) or real_path in visited:  # a loop of links, or another path to the same folder
                subfolders.remove(name)
            visited.add(real_path)
    return sort_files(iter(found), sort)


def shown_counts(counts: Mapping[str, int]) -> str:
    """Return counts of files for messages: "3 .heic, 1 hidden"."""
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def none_but(ignored: Mapping[str, int], what: str) -> str:
    """Return for an error that only other files were found: "3 .heic, and no images"."""
    return f"{shown_counts(ignored)}, and no {what}" if ignored else f"no {what}"


def log_ignored(folder: Path | str, counts: Mapping[str, int]) -> None:
    """Log how many files of a folder are not read, if any."""
    if counts:
        _log.info("ignored files in %s: %s", folder, shown_counts(counts))


def sort_files(paths: Iterator[Path], sort: Sort) -> list[Path]:
    """Sort files in natural order or by modification time, or leave them in the order found."""
    if sort == "none":
        return list(paths)
    if sort == "mtime":
        return sorted(paths, key=lambda path: (_mtime_ns(path), natural_key(str(path))))
    return sorted(paths, key=lambda path: natural_key(str(path)))


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # deleted since it was listed; reported later as an unreadable frame
        return 0
