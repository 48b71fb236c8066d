"""Atomic file writing, locks and checks of output paths."""

from __future__ import annotations

import binascii
import codecs
import contextlib
import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from remtta.errors import OutputError, UsageError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

UTF16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
LOCK = ".lock"
MANIFEST = "corrupt.json"  # in the root of a tree that remtta corrupt made
_WAIT_S = 0.1  # for a lock, since another process's `is_locked` may hold it for a moment
IN_USE = "another run is writing to {}; choose another --output, or wait for it"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no quota error

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the cache folder, which may be deleted: $REMTTA_CACHE, else remtta in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("REMTTA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remtta"


def as_path(path: object, what: str) -> Path:
    """Return a path that a caller gave; raise UsageError if it is none."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise UsageError(f"{what} must be a path, got {path!r:.80}")
    return Path(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn any OSError into an OutputError that names the file."""
    try:
        yield
    except OSError as error:
        advice = "; free some space and try again (adapt and eval: with --resume)" if error.errno in _FULL else ""
        raise OutputError(f"{path} cannot be written: {error.strerror or error}{advice}") from error


def read_text(path: str | Path, option: str, errors: str = "strict") -> str:
    """Return the text of a file that an option names; raise UsageError if it cannot be read as UTF-8, or as UTF-16 with
    a byte order mark (PowerShell's).
    """
    try:
        data = Path(path).read_bytes()
        return data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig", errors)
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option}: {path} is not UTF-8 text: {error}; save it as UTF-8") from error


def check_can_hold(folder: Path, what: str, option: str) -> None:
    """Raise UsageError if a folder or one of its parents is a file, OutputError if it is not writable.

    The message has its purpose ("a run folder") and the option that names it ("--output").
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        subject = "it" if nearest == folder else folder
        raise UsageError(f"{nearest} is a file, so {subject} cannot be {what}; choose another {option}")
    _check_writable(folder, nearest, option)


def _check_writable(path: Path, folder: Path, option: str) -> None:
    """Raise OutputError if the folder that is to hold a file or folder is not writable."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} is not writable; make it so, or choose another {option}")
    import tempfile  # slow, and not needed for --help

    with writing(path), tempfile.TemporaryDirectory(prefix=".remtta-", dir=folder):
        pass  # some file systems, such as /proc, refuse what the permissions allow


def check_target(path: Path, option: str, suffix: str, *, overwrite: bool, made_by_then: Path | None = None) -> None:
    """Raise UsageError before any work if a file has another suffix, or exists, or its folder, a link's target's, does
    not; OutputError if that folder is not writable.

    Args:
        option: The option that names it, for the message: "--output".
        made_by_then: A parent folder that need not exist yet.
    """
    if path.suffix != suffix:
        raise UsageError(f"{option} {path} must end in {suffix}")
    if path.exists() and not path.is_file():
        what = "folder" if path.is_dir() else "device or a pipe"
        raise UsageError(f"{option} {path} is a {what}; name a file")
    parent = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    will_exist = made_by_then is not None and os.path.realpath(parent) == os.path.realpath(made_by_then)
    if not will_exist and not parent.is_dir():
        raise UsageError(f"{option}: {parent}: no such folder; make it first")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another {option} or add --overwrite")
    if not will_exist:
        _check_writable(path, parent, option)


def check_not_input(path: Path, option: str, inputs: Iterable[str | Path | None]) -> None:
    """Raise UsageError if there is a file of this name that is one of a command's inputs, or lies in one."""
    nested = (path, *path.resolve().parents) if path.exists() else ()
    for source in inputs:
        if source and Path(source).exists() and any(folder.samefile(source) for folder in nested):
            raise UsageError(f"{option} {path} would replace its own input {source}; choose another")


def write_atomically(path: Path, write: Callable[[Path], object], *, durable: bool = True) -> None:
    """Call `write` on a temporary file beside `path`, then rename it; raise OutputError if the file cannot be written,
    or is a device or pipe; what exists is then left unchanged. A link stays, and its target is replaced.

    Args:
        write: Called with the path of the temporary file.
        durable: Sync, so that the file survives a power failure; without it, such a failure may leave an empty file.
            For thousands of small files that can be made again, syncing would take most of the time.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OutputError(f"{path} is a device or a pipe, and cannot be replaced; name a file")
    target = Path(os.path.realpath(path))  # unlike Path.resolve, copes with circular links
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            temporary.unlink(missing_ok=True)
            temporary.touch(exist_ok=False)  # not through a link that somebody else has put there
            write(temporary)
            if durable:
                with open(temporary, "r+b") as file:  # Windows only syncs files that are open for writing
                    os.fsync(file.fileno())
            os.replace(temporary, target)
            if durable:
                _sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):  # if it could not be created, it cannot be removed either
            temporary.unlink()


def remove_leftovers(folder: Path, names: Sequence[str], *, untouched_for_s: float = 0.0) -> None:
    """Remove temporary files that `write_atomically` left in a folder when its process was killed.

    Args:
        names: Names or patterns of the final files.
        untouched_for_s: Keep files changed within this many seconds: without a lock, a process on another machine may
            be writing them.
    """
    if fcntl is None or not folder.is_dir():  # Windows: there is no way to tell whether a process is alive
        return
    with contextlib.suppress(OSError):  # leftovers that cannot be removed are harmless
        for path in list(folder.iterdir()):
            match = re.fullmatch(r"\.(.+)\.(\d{1,9})\.tmp", path.name, re.DOTALL)
            if not match or not any(fnmatchcase(match[1], name) for name in names):
                continue
            if not _is_alive(int(match[2])) and time.time() - path.stat().st_mtime >= untouched_for_s:
                path.unlink()
                _log.debug("removed %s, which a killed process left behind", path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def to_json(content: object, *, indent: int | None = None, allow_nan: bool = False) -> str:
    """Return content as JSON in ASCII that every reader takes; raise ValueError if a number is not allowed.

    Text that is not UTF-8, of file and class names, becomes readable, such as `caf\\xe9.png`; `source_bytes` beside a
    field `source` then has its bytes in base64, from which `from_json` restores it.
    """
    text = json.dumps(content, indent=indent, allow_nan=allow_nan)
    # Escapes of surrogates may stand for invalid bytes.
    return json.dumps(_readable(content), indent=indent) if "\\ud" in text else text


def _readable(content: Any) -> Any:
    if isinstance(content, str):
        return _encoded(content).decode("utf-8", "backslashreplace")
    if isinstance(content, list | tuple):
        return [_readable(item) for item in content]
    if not isinstance(content, Mapping):
        return content
    readable = {_readable(name): _readable(value) for name, value in content.items()}
    texts = {name: value for name, value in content.items() if isinstance(value, str) and value != _readable(value)}
    return readable | {
        f"{name}_bytes": binascii.b2a_base64(_encoded(text), newline=False).decode() for name, text in texts.items()
    }


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", sys.getfilesystemencodeerrors())
    except UnicodeEncodeError:  # not from a file name
        return text.encode("utf-8", "surrogatepass")


def from_json(text: str) -> Any:
    """Return the content of JSON by `to_json`; raise ValueError if it is damaged."""
    return json.loads(text, object_hook=_restored if '_bytes": "' in text else None)


def _restored(content: dict[str, Any]) -> dict[str, Any]:
    for name in [name for name in content if isinstance(content.get(f"{name}_bytes"), str)]:
        data = binascii.a2b_base64(content.pop(f"{name}_bytes"))
        try:
            content[name] = data.decode("utf-8", sys.getfilesystemencodeerrors())
        except UnicodeDecodeError:  # from another system
            content[name] = data.decode("utf-8", "surrogateescape")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; raise OutputError if the file cannot be written."""
    text = to_json(content, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds a folder's `FolderLock`, or None if that cannot be determined. Changes nothing."""
    if fcntl is None:
        return None
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks, or a file of another user
        return None
    return False


class FolderLock:
    """A lock on a folder, created if needed, for a single writing process; released when that ends, however it ends.
    Raise UsageError if another run is writing to it.
    """

    def __init__(self, folder: Path) -> None:
        from filelock import FileLock, Timeout  # here, since the import takes 70 ms

        self._path = folder / LOCK
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with writing(self._path):
            if self._path.is_symlink():  # do not write through a link
                self._path.unlink()
            self._path.touch()
        self._lock = FileLock(self._path, timeout=_WAIT_S, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(poll_interval=_WAIT_S / 5)
        except Timeout:
            raise UsageError(IN_USE.format(folder)) from None
        except OSError:  # a file system without locks, such as some network drives
            _log.debug("%s cannot be locked", folder)

    def release(self) -> None:
        """Release the lock."""
        # Remove the file before unlocking: afterwards it may be that of the next holder. It stays if the disk is gone,
        # or on Windows, which removes no open files.
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._lock.release()


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the rename holds nonetheless
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
