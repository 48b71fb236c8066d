"""A folder here with a copy in a store, for results that are to outlast the machine."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path, PurePosixPath

from remtta.errors import DownloadError, OutputError, RemttaError, UsageError
from remtta.remote import Remote, Stored, remote_at, told
from remtta.runs.saving import Pace

_EVERY_S = 30.0

_log = logging.getLogger("remtta")


class Mirror:
    """A folder of this machine's temporary ones with a copy at an address: got at first, and sent again and again.

    Records are sent last, as they were before the rest was sent, and rows only ever grow: so what the store has can be
    gone on with at any time. A context manager, which sends all at the end, however that comes, and keeps the folder
    only where it could not.

    Attributes:
        folder: The folder.

    Args:
        address: Where the copy is; its objects appear as a whole.
        records: Names of files that say how far the others have come, in the order in which they are to be believed.
        apart: Names of folders that are not copied.
    """

    def __init__(self, address: str, *, records: tuple[str, ...], apart: tuple[str, ...] = ()) -> None:
        self.address, self._records, self._apart = address.rstrip("/"), records, apart
        remote = remote_at(self.address)
        if isinstance(remote, Path):
            raise UsageError(f"{address} is a folder of this machine; give it without file://")
        self._remote: Remote = remote
        self._pace = Pace()
        self._sent: dict[str, tuple[int, int]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="remtta-"))

    def __enter__(self) -> Mirror:
        try:
            self._get()
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.send()
        except RemttaError as failure:
            raise OutputError(f"{failure}; the results are in {self.folder}") from failure
        shutil.rmtree(self.folder)

    def address_of(self, path: Path) -> str:
        """Where the copy of a file or folder is."""
        return "/".join((self.address, *path.relative_to(self.folder).parts))

    def send_if_due(self) -> None:
        """Send what has changed, twice a minute at most; a store that is away now is tried again then."""
        if self._pace.allows(_EVERY_S):
            with self._pace.timed():
                try:
                    self.send()
                except OutputError as error:
                    _log.warning("%s; trying again later", error)

    def send(self) -> None:
        """Send what has changed, and remove there what is gone here.

        Raises:
            OutputError: If the store refuses.
        """
        files, root, shown = self._remote
        there = self._files()
        changed = [name for name, stamp in there.items() if self._sent.get(name) != stamp]
        records = {
            name: (self.folder / name).read_bytes() for name in sorted(changed, key=self._rank) if self._rank(name)
        }
        with told(shown, OutputError):
            for name in changed:
                if name not in records:
                    files.put_file(str(self.folder / name), f"{root}/{name}")
            for name, content in records.items():
                files.pipe_file(f"{root}/{name}", content)
            for name in self._sent.keys() - there.keys():
                files.rm_file(f"{root}/{name}")
        self._sent = there

    def remove(self, folder: Path) -> None:
        """Remove the copy of a folder that is not copied by this one.

        Raises:
            OutputError: If the store refuses.
        """
        Stored(self.address, folder.relative_to(self.folder).parts).remove()

    def _rank(self, name: str) -> int:
        """0 of no record."""
        last = PurePosixPath(name).name
        return self._records.index(last) + 1 if last in self._records else 0

    def _files(self) -> dict[str, tuple[int, int]]:
        """Size and time of every file that is copied."""
        found = {}
        for path in self.folder.rglob("*"):
            parts = path.relative_to(self.folder).parts
            passing = path.name == ".lock" or path.name.endswith(".tmp")
            if path.is_file() and not passing and not set(parts) & set(self._apart):
                found["/".join(parts)] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found

    def _get(self) -> None:
        files, root, shown = self._remote
        with told(shown, DownloadError):
            bucket = root.partition("/")[0]
            if bucket and not files.exists(bucket):
                raise UsageError(f"{shown}: there is no such bucket; check its name, or make it")
            for path in files.find(root):
                name = PurePosixPath(path.removeprefix(f"{root}/"))
                if {"..", *self._apart} & set(name.parts) or name.is_absolute():
                    continue
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                files.get_file(path, str(target))
        self._sent = self._files()
