"""Versions of a delta in a folder: whole or absent, never replaced, and one can go back."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from remtta import load_delta, save_delta
from remtta.deltas import registry, stores
from remtta.errors import DeltaError, OutputError, UsageError
from remtta.files import write_new
from tests.deltas.test_mixing import delta_of


def test_what_was_pushed_is_pulled_byte_for_byte_and_one_can_go_back(deltas: list[Path], tmp_path: Path) -> None:
    folder, got = tmp_path / "site" / "cam1", tmp_path / "got.safetensors"
    assert [registry.push(path, folder) for path in deltas] == ["1", "2"]
    assert registry.pull(folder, got) == registry.pull(Path(f"{folder}@latest"), got) == "2"
    assert got.read_bytes() == deltas[1].read_bytes()
    assert registry.push(Path(f"{folder}@1"), folder) == "3"
    assert registry.pull(folder, got) == "3" and got.read_bytes() == deltas[0].read_bytes()
    newest, middle, oldest = registry.history(folder)
    assert [each["version"] for each in (newest, middle, oldest)] == [3, 2, 1]
    assert newest["file_sha256"] == oldest["file_sha256"] == load_delta(deltas[0]).file_sha256
    os.utime(folder / "0003.safetensors", (0, 0))
    assert registry.history(folder)[0]["pushed"] == "1970-01-01T00:00:00+00:00" < middle["pushed"]
    assert {path.name for path in folder.iterdir()} == {f"000{number}.safetensors" for number in (1, 2, 3)}


def test_what_is_no_version_is_refused(deltas: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "cam1"
    with pytest.raises(UsageError, match="holds no versions"):
        registry.pull(folder, tmp_path / "got.safetensors")
    with pytest.raises(UsageError, match="holds no versions"):
        registry.history(folder)
    registry.push(deltas[0], folder)
    for version in ("2", "0", "first", ""):
        with pytest.raises(UsageError, match=f'has no version "{version}"; it has 1 to 1, and latest'):
            registry.pull(Path(f"{folder}@{version}"), tmp_path / "got.safetensors")
    with pytest.raises(UsageError, match="name the folder alone"):
        registry.push(deltas[0], Path(f"{folder}@1"))
    save_delta(tmp_path / "other.safetensors", delta_of(base="cd", norm__weight=[1.0]))
    with pytest.raises(DeltaError, match="push it to a folder of its own"):
        registry.push(tmp_path / "other.safetensors", folder)


def test_a_damaged_version_is_listed_and_neither_pulled_nor_pushed(deltas: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "cam1"
    registry.push(deltas[0], folder)
    registry.push(deltas[1], folder)
    path = folder / "0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert "does not match its checksum" in registry.history(folder)[1]["error"]
    with pytest.raises(DeltaError, match="checksum"):
        registry.pull(Path(f"{folder}@1"), tmp_path / "x")
    with pytest.raises(DeltaError, match="checksum"):
        registry.push(path, folder)
    assert not (tmp_path / "x").exists()


def test_a_name_that_is_taken_in_the_meantime_is_left_alone(
    deltas: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cam1"
    registry.push(deltas[0], folder)
    before = (folder / "0001.safetensors").read_bytes()
    monkeypatch.setattr(stores, "_next", lambda place: stores.Version(1))  # as it was before the other push
    assert registry.push(deltas[1], folder) == "2"
    assert (folder / "0001.safetensors").read_bytes() == before


def test_a_full_disk_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match="No space left"):
        write_new(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_of_several_writers_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = iter(range(8))
    monkeypatch.setattr(os, "getpid", lambda: next(pids))  # threads in place of processes
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda number: write_new(tmp_path / "file", bytes([number])), range(8)))
    assert sum(done) == 1 and (tmp_path / "file").read_bytes() == bytes([done.index(True)])
    assert len(list(tmp_path.iterdir())) == 1
