"""The folder of a run. Imports no torch, so that a bad folder is reported at once."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remtta.deltas import DELTA
from remtta.errors import UsageError
from remtta.files import IN_USE, LOCK, FolderLock, check_can_hold, is_locked, remove_leftovers, writing
from remtta.runs.reading import read_record

PREDICTIONS = "predictions.jsonl"
RECORD = "run.json"
RESULTS = "results.json"  # of an evaluation
STATE = "state.safetensors"
EVENTS = "events.jsonl"
BATCHES = "batches.jsonl"
MQTT = "mqtt.json"  # how many bytes of the predictions the broker has confirmed
_RESERVE = ".reserve"  # of runs by 0.5.0
STREAM_GROUP = "site.json"  # of many streams that share a model, with their folders beside it

OWN_FILES = (PREDICTIONS, DELTA, RECORD, RESULTS, STATE, EVENTS, BATCHES, MQTT, STREAM_GROUP, _RESERVE, LOCK)
"""Files that only runs write."""

_KINDS = {
    RECORD: ("a run of remtta adapt", (PREDICTIONS, DELTA, RECORD)),
    RESULTS: ("an evaluation", (RESULTS, PREDICTIONS)),
    STREAM_GROUP: ("the runs of many streams", (STREAM_GROUP,)),
}
"""The files of each kind of folder, by the file that identifies it."""

_LONGEST_SHOWN, _MOST_SHOWN = 60, 3


def check_same_model(folder: Path, name: str) -> None:
    """Raise UsageError if the run in a folder, which is to resume, has another model than this, before it is loaded."""
    record = read_record(folder / RECORD) if (folder / RECORD).exists() else {}
    own = record.get("model", {}).get("name") or name
    if ":" in own + name or own in (name, "unknown") or own.partition(".")[0] == name.partition(".")[0]:
        return
    from remtta.models.building import current_name  # with timm, which takes seconds

    if own.partition(".")[0] != current_name(name).partition(".")[0]:
        raise UsageError(f"--resume needs the settings the run began with: model.name was {own}, is {name}")


@contextlib.contextmanager
def run_folder(output: str | Path | None, root: Path = Path("runs")) -> Iterator[Path]:
    """Yield the folder `output`, or a new one under `root` named by the UTC time.

    The new folder is created at once, so that no other run gets it, and removed at the end if it is empty. Raise
    OutputError if it cannot be created.
    """
    if output is not None:
        yield Path(output)
        return
    stamp, was_there = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), root.exists()
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)  # fails for a file, and for a link to nowhere
    for number in itertools.count(1):
        folder = root / (stamp if number == 1 else f"{stamp}-{number}")
        with writing(folder), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()
            if not was_there:
                root.rmdir()


def check_folder(folder: Path, own: str = RECORD, *, overwrite: bool, resume: bool = False) -> None:
    """Raise if a folder is in use or not writable, or holds what may not be overwritten; changes nothing.

    The file `own` will say what it holds: RECORD, RESULTS or STREAM_GROUP.
    """
    if own == RECORD and folder == Path("-"):
        raise UsageError('--output is a folder; for predictions on standard output, use "--predictions -"')
    if is_locked(folder):
        raise UsageError(IN_USE.format(folder))
    check_free(folder, own, overwrite=overwrite, resume=resume)
    check_can_hold(folder, "a folder of results", "--output")


def check_free(folder: Path, own: str = RECORD, *, overwrite: bool, resume: bool) -> None:
    """Raise UsageError if a folder holds what may not be overwritten."""
    for name, (what, _) in _KINDS.items():
        if name != own and (folder / name).exists():
            raise UsageError(f"{folder} holds {what}; choose another --output")
    what, files = _KINDS[own]
    earlier = [name for name in files if (folder / name).exists()]
    if earlier and not (overwrite or resume):
        raise UsageError(
            f"{folder} holds {what} already ({', '.join(earlier)}); choose another --output, or add --overwrite to "
            "replace it, --resume to continue it"
        )
    if own in earlier or own == STREAM_GROUP or overwrite:  # of many streams, each run has a folder of its own
        return
    if any((folder / name).stat().st_size for name in earlier):
        raise UsageError(f"{folder} has lost its {own}, so it cannot be resumed; --overwrite replaces it")
    # Results are not written among images by mistake. A failed run may have left its health file, a .json file.
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if others := sorted(name for name in names - {*OWN_FILES} if name[0] != "." and not name.endswith(".json")):
        raise UsageError(
            f"{folder} is not empty ({others[0]}{', ...' if others[1:] else ''}) and holds no earlier run; choose "
            "another --output, or add --overwrite to write there anyway"
        )


def check_same_settings(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError, naming the first few, if settings (as of JSON) differ from those that a run began with."""
    if changed := list(_differences(earlier, now)):
        more = [f"and {len(changed) - _MOST_SHOWN} more"] if len(changed) > _MOST_SHOWN else []
        shown = "; ".join([*changed[:_MOST_SHOWN], *more])
        advice = "use the same value again, or choose another --output"
        raise UsageError(f"--resume needs the settings the run began with: {shown}; {advice}")


def _differences(earlier: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(earlier, Mapping) and isinstance(now, Mapping):
        for key in {**earlier, **now}:
            yield from _differences(earlier.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif isinstance(earlier, list) and isinstance(now, list) and len(earlier) == len(now):
        for number, (before, after) in enumerate(zip(earlier, now, strict=True)):
            yield from _differences(before, after, f"{name}[{number}]")
    elif earlier != now:
        texts = json.dumps(earlier), json.dumps(now)
        was, is_now = (f"{text[:_LONGEST_SHOWN]}..." if len(text) > _LONGEST_SHOWN else text for text in texts)
        yield f"{name} was {was}, is {is_now}"


class RunFolder:
    """The folder of a run in progress, and its lock."""

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        self._overwrite, self._resume = overwrite, resume
        self._lock: FolderLock | None = None

    def lock(self) -> None:
        """Create the folder if needed, and lock it for this process; raise UsageError if another run writes to it."""
        self._lock = FolderLock(self.path)
        remove_leftovers(self.path, OWN_FILES)
        (self.path / _RESERVE).unlink(missing_ok=True)

    def claim(self) -> None:
        """Prepare the folder for a new run; raise UsageError if it holds one that may not be replaced."""
        self.lock()
        check_free(self.path, overwrite=self._overwrite, resume=self._resume)  # another run may just have ended there
        with writing(self.path):
            (self.path / PREDICTIONS).touch()
            for name in (DELTA, STATE, EVENTS, BATCHES, MQTT):
                (self.path / name).unlink(missing_ok=True)

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock:
            self._lock.release()
