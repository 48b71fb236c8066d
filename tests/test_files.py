import errno
import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from remtta import RunOptions, adapt_stream
from remtta.deployment.health import Health
from remtta.errors import OutputError, UsageError
from remtta.files import (
    FolderLock,
    check_can_hold,
    check_target,
    from_json,
    is_locked,
    remove_leftovers,
    write_atomically,
    write_json,
)
from remtta.runs.folder import RunFolder
from remtta.runs.writer import RowWriter
from tests.conftest import raising, tiny_vit
from tests.runs.tiny import Each


def test_the_file_does_not_appear_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = tmp_path / "out.txt", []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE))
    path.write_text("earlier")

    def write(temporary: Path) -> None:
        temporary.write_text("whole")
        assert path.read_text() == "earlier"
        assert temporary.parent == tmp_path  # a rename is atomic within one file system only

    write_atomically(path, write)
    assert path.read_text() == "whole"
    assert modes == [os.O_RDWR, os.O_RDONLY]  # of file and folder; Windows only syncs files that are open for writing


@pytest.mark.parametrize("failing", ["write", "fsync", "replace", "interrupt"])
def test_a_failing_write_leaves_the_earlier_file_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, full = tmp_path / "out.txt", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    path.write_text("earlier")

    def write(temporary: Path) -> None:
        temporary.write_text("half of")
        if failing == "write":
            full()
        if failing == "interrupt":
            raise KeyboardInterrupt

    if failing in ("fsync", "replace"):
        monkeypatch.setattr(os, failing, full)
    with pytest.raises(KeyboardInterrupt if failing == "interrupt" else OutputError) as caught:
        write_atomically(path, write)
    message = f"{path} cannot be written: {os.strerror(errno.ENOSPC)}; free some space"
    assert failing == "interrupt" or str(caught.value).startswith(message)
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("name", ["absent/out.txt", "file/out.txt", "folder", "n" * 300])
def test_a_path_that_cannot_be_a_file_is_an_output_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"cannot be written: \w+"):
        write_atomically(tmp_path / name, lambda temporary: temporary.write_text("whole"))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_link_is_followed_and_a_pipe_or_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "folder" / "out.json")
    for content in ({"a": 1}, {"a": 2}):
        write_json(tmp_path / "link.json", content)
        assert (tmp_path / "link.json").is_symlink()
        assert json.loads((tmp_path / "folder" / "out.json").read_text()) == content
    assert os.listdir(tmp_path / "folder") == ["out.json"]
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", Path("/dev/full")):
        before = path.stat()
        with pytest.raises(OutputError, match=f"^{path} is a device or a pipe, and cannot be replaced; name a file$"):
            write_json(path, {})
        assert path.stat() == before
    with pytest.raises(UsageError, match=r"^--output .* is a device or a pipe; name a file$"):
        check_target(tmp_path / "pipe.safetensors", "--output", ".safetensors", overwrite=True)


@pytest.mark.parametrize("replaced", [False, True])
def test_rows_that_are_deleted_while_they_are_written_are_an_error(replaced: bool, tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "rows.jsonl")
    writer.write([{"index": 0}])
    (tmp_path / "rows.jsonl").unlink()
    if replaced:
        (tmp_path / "rows.jsonl").touch()
    with pytest.raises(
        OutputError, match=r"rows\.jsonl was deleted or replaced while it was written; its rows are lost"
    ):
        writer.write([{"index": 1}])
    writer.close()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_others_may_read_the_file_as_the_umask_says(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "out.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == mode


def test_a_folder_that_cannot_be_created_is_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_can_hold(tmp_path / "a" / "b", "a folder of results", "--output")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "mkdir", raising(OSError(errno.ENOENT, "No such file or directory")))  # as below /proc
    with pytest.raises(OutputError, match="b cannot be written: No such file or directory"):
        check_can_hold(tmp_path / "a" / "b", "a folder of results", "--output")


def test_a_folder_that_holds_no_new_file_is_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_target(tmp_path / "a.onnx", "--output", ".onnx", overwrite=False)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OutputError, match=f"^{tmp_path} is not writable; make it so, or choose another --output$"):
        check_target(tmp_path / "a.onnx", "--output", ".onnx", overwrite=False)


def test_json_is_written_for_people_and_machines_and_never_holds_nan(tmp_path: Path) -> None:
    content = {"name": "Jürgen\n\udcff", "values": [1, 0.1, None]}
    write_json(tmp_path / "run.json", content)
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert from_json(text) == content and json.loads(text)["name"] == "Jürgen\n\\xff"
    assert text.endswith("}\n")
    assert text.count("\n") > len(content)
    with pytest.raises(ValueError):
        write_json(tmp_path / "run.json", {"value": float("nan")})
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_takes_a_run(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", raising(OSError(code, os.strerror(code))))
    lock = FolderLock(tmp_path)
    assert is_locked(tmp_path) is None
    lock.release()
    assert os.listdir(tmp_path) == []


def test_checking_the_lock_does_not_stop_a_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").write_bytes(b"")
    looking = open(tmp_path / ".lock", "rb")  # noqa: SIM115 - closed while the other one waits
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("remtta.files.time.sleep", lambda _: looking.close())
    lock = FolderLock(tmp_path)
    assert looking.closed and is_locked(tmp_path)
    lock.release()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_in_use_is_reported_before_anything_else(options: Any, frames: Path, tmp_path: Path) -> None:
    adapt_stream(tiny_vit(), frames, tmp_path / "run")
    lock = FolderLock(tmp_path / "run")
    assert is_locked(tmp_path / "run")
    with pytest.raises(UsageError, match="another run is writing to"):
        FolderLock(tmp_path / "run")
    with pytest.raises(UsageError, match="another run is writing to"):
        adapt_stream(None, frames, tmp_path / "run", options=RunOptions(**options))  # type: ignore[arg-type]
    lock.release()
    assert is_locked(tmp_path / "run") is False
    (tmp_path / "run" / ".lock").touch()  # as a killed process leaves it
    assert is_locked(tmp_path / "run") is False


def test_every_file_of_a_run_is_documented(frames: Path, tmp_path: Path) -> None:
    seen: set[str] = set()
    adapt_stream(
        tiny_vit(), frames, tmp_path / "run", callbacks=[Each(lambda _: seen.update(os.listdir(tmp_path / "run")))]
    )
    seen.update(os.listdir(tmp_path / "run"))
    assert len(seen) == 7
    text = (Path(__file__).parent.parent / "docs" / "files.md").read_text()
    assert [name for name in seen if f"`{name}`" not in text] == []


def killed_while_writing(*paths: Path) -> None:
    """Write half of the files in a process that is then killed."""
    process = multiprocessing.get_context("forkserver").Process(target=write_half_of, args=paths)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def write_half_of(path: Path, *more: Path) -> None:
    def half(temporary: Path) -> None:
        temporary.write_text("half of")
        if more:
            write_half_of(*more)
        os.kill(os.getpid(), signal.SIGKILL)

    write_atomically(path, half)


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "run.json", tmp_path / "other.json")
    half_run, half_other = sorted(os.listdir(tmp_path), reverse=True)
    assert half_run.startswith(".run.json.") and half_other.startswith(".other.json.")
    others = {half_other, f".run.json.{os.getpid()}.tmp", ".run.json.tmp", "run.json.1.tmp", ".run.json.x1.tmp"}
    for name in others:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, ["run.json"], untouched_for_s=60)
    assert half_run in os.listdir(tmp_path)
    remove_leftovers(tmp_path, ["run.json"])
    assert set(os.listdir(tmp_path)) == others
    remove_leftovers(tmp_path, ["*.json"])
    assert set(os.listdir(tmp_path)) == others - {half_other}
    remove_leftovers(tmp_path / "absent", ["*"])


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}])
def test_a_run_removes_what_a_killed_one_was_writing(options: Any, frames: Path, tmp_path: Path) -> None:
    folder, health = tmp_path / "run", tmp_path / "health[1].json"
    adapt_stream(tiny_vit(), frames, folder)
    killed_while_writing(folder / "state.safetensors", folder / "mqtt.json", folder / "mine.txt", health)
    assert len(list(tmp_path.rglob(".*.tmp"))) == 4
    adapt_stream(tiny_vit(), frames, folder, options=RunOptions(**options), callbacks=[Health(health)])
    [kept] = tmp_path.rglob(".*.tmp")
    assert kept.name.startswith(".mine.txt.")


@pytest.mark.parametrize("name", [".lock", "predictions.jsonl", ".run.json.{pid}.tmp"])
def test_a_planted_link_is_not_written_through(name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name.format(pid=os.getpid())).symlink_to(tmp_path / "precious")
    held = RunFolder(folder)
    held.lock()
    RowWriter(folder / "predictions.jsonl").close()
    write_json(folder / "run.json", {})
    assert (tmp_path / "precious").read_text() == "mine"
    held.release()
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_process_of_another_user_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leftover = tmp_path / f".a.json.{os.getpid() + 1}.tmp"
    leftover.touch()
    monkeypatch.setattr(os, "kill", raising(PermissionError()))
    remove_leftovers(tmp_path, ("a.json",))
    assert leftover.exists()
