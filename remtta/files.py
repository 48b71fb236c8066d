"""Files that are either whole or absent: written under another name, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from remtta.errors import OutputError, UsageError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LOCK = ".lock"
_TRIES, _PAUSE_S = 5, 0.02
_IN_USE = "another run is writing to {}; choose another --output, or wait for it"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # a quota is unknown to Windows

_log = logging.getLogger("remtta")


def cache_folder() -> Path:
    """Return where what is only quicker to read than to make is kept; it may be deleted at any time.

    $REMTTA_CACHE, else remtta in $XDG_CACHE_HOME or ~/.cache.
    """
    own = os.environ.get("REMTTA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remtta"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into one error that names the file.

    Raises:
        OutputError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        advice = "; free some space, then continue (a run with --resume)" if error.errno in _FULL else ""
        raise OutputError(f"{path} cannot be written: {error.strerror or error}{advice}") from error


def check_can_hold(folder: Path, what: str, option: str) -> None:
    """Refuse a folder that cannot be made or written to, touching nothing.

    Args:
        folder: The folder.
        what: What it is to be: "a run folder".
        option: What names another one: "--output".

    Raises:
        UsageError: If it, or what it would be in, is a file.
        OutputError: If it is not writable.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UsageError(f"{nearest} is a file, so {folder} cannot be {what}; choose another {option}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{nearest} is not writable; choose another {option}")


def check_target(path: Path, option: str, suffix: str, *, overwrite: bool, made_by_then: Path | None = None) -> None:
    """Refuse a file that is not to be written, before any work.

    Args:
        path: The file.
        option: What names it: "--output".
        suffix: What it must end in.
        overwrite: Whether it may be there.
        made_by_then: A folder that need not be there yet.

    Raises:
        UsageError: If it ends otherwise, is there, or its folder is not.
    """
    if path.suffix != suffix or path.is_dir():
        raise UsageError(f"{option} {path} must end in {suffix}")
    if path.parent != made_by_then and not path.parent.is_dir():
        raise UsageError(f"{option}: {path.parent}: no such folder; make it first")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another {option} or add --overwrite")


def write_atomically(path: Path, write: Callable[[Path], object], *, durable: bool = True) -> None:
    """Have `write` fill a temporary file beside `path`, then put it in place.

    Args:
        path: The file.
        write: Gets the temporary file's name.
        durable: Wait until the file would outlast a power failure, too. Without it, such a failure may leave an
            empty file; for thousands of small files that can be made again, the wait is most of the work.

    Raises:
        OutputError: If the disk refuses; a file that stood there is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            write(temporary)
            if durable:
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if durable:
                _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # where it could not be made, it cannot be removed either
            temporary.unlink()


def remove_leftovers(folder: Path, names: Sequence[str], *, untouched_for_s: float = 0.0) -> None:
    """Remove the temporary files that `write_atomically` left in a folder when its process was killed.

    Args:
        folder: Where they may be, if it exists.
        names: Names or patterns of the files that were to be written.
        untouched_for_s: Leave out those changed since: where no lock keeps others away, a process on another machine
            may be writing.
    """
    if fcntl is None or not folder.is_dir():  # Windows: nothing tells whether a process lives
        return
    with contextlib.suppress(OSError):  # what cannot be removed harms nobody
        for path in list(folder.iterdir()):
            found = re.fullmatch(r"\.(.+)\.(\d{1,9})\.tmp", path.name, re.DOTALL)
            if not found or not any(fnmatchcase(found[1], name) for name in names):
                continue
            if not _lives(int(found[2])) and time.time() - path.stat().st_mtime >= untouched_for_s:
                path.unlink()
                _log.debug("removed %s, which a killed process left behind", path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        OutputError: If the disk refuses.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds a folder's `FolderLock`; None where nothing can tell. Changes nothing."""
    if fcntl is None:
        return None
    try:
        with open(folder / _LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks, or a file of another user
        return None
    return False


def check_not_in_use(folder: Path) -> None:
    """Refuse a folder whose lock is held.

    Raises:
        UsageError: If another run is writing to it.
    """
    if is_locked(folder):
        raise UsageError(_IN_USE.format(folder))


class FolderLock:
    """A folder that one process at a time writes to; let go of when the process ends, however it ends.

    Args:
        folder: An existing folder.

    Raises:
        UsageError: If another run is writing to it.
        OutputError: If the lock's file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK
        with writing(self._path):
            if self._path.is_symlink():  # which somebody put there: what it points to is not touched
                self._path.unlink()
            self._file = open(self._path, "ab")  # noqa: SIM115 - open as long as the lock is held
        if fcntl is None:  # Windows: nothing keeps two runs apart
            return
        try:
            held = self._taken()
        except OSError:  # a file system without locks, such as some network drives
            _log.debug("%s cannot be locked", folder)
            return
        if not held:
            self._file.close()
            raise UsageError(_IN_USE.format(folder))

    def _taken(self) -> bool:
        """Whether the lock is had now; `is_locked` of another process may hold it for a moment."""
        for _ in range(_TRIES):
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))  # not just released
            time.sleep(_PAUSE_S)
        return False

    def release(self) -> None:
        """Let others write to the folder."""
        with contextlib.suppress(OSError):  # a disk that is gone needs no lock
            self._path.unlink(missing_ok=True)
        self._file.close()


class Reserve:
    """Room on the disk that a run gives up for its last files, so that they fit even when it is full.

    Args:
        path: A file of zeros, there until it is released.
        num_bytes: How much room to keep.

    Raises:
        OutputError: If there is not that much.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        try:
            with writing(path):
                path.unlink(missing_ok=True)  # a link that somebody put there is not written through
                with open(path, "xb") as file:
                    file.write(bytes(num_bytes))
        except OutputError:
            self.release()
            raise

    def release(self) -> None:
        """Give the room back."""
        with contextlib.suppress(OSError):  # a disk that is gone has no room to give
            self._path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the rename stands all the same
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
