"""Versions of a delta at addresses of stores, as in a folder; of two pushed at the same time, both stay."""

from __future__ import annotations

import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from remtta import save_delta
from remtta.deltas import registry, stores
from remtta.errors import DeltaError, OutputError, RemttaError, UsageError
from tests.command import refusal_of, remtta_here
from tests.deltas.test_mixing import delta_of

CAM = "memory://site/cam1"


def test_a_store_keeps_versions_as_a_folder_does(deltas: list[Path], memory: dict[str, Any], tmp_path: Path) -> None:
    got = tmp_path / "got.safetensors"
    with pytest.raises(UsageError, match=f"{CAM} holds no versions"):
        registry.pull(CAM, got)
    assert [registry.push(source, CAM)[:2] for source in (*map(str, deltas), f"{CAM}@1")] == ["1-", "2-", "3-"]
    for address, content in ((CAM, 0), (f"{CAM}/@2", 1), (f"{CAM}@latest", 0), (f"{CAM}@0002", 1)):
        registry.pull(address, got)
        assert got.read_bytes() == deltas[content].read_bytes()
    newest, middle, oldest = registry.history(CAM)
    assert newest["file_sha256"] == oldest["file_sha256"] and newest["pushed"] >= middle["pushed"]
    assert sorted(memory)[0] == f"/site/cam1/0001-{oldest['file_sha256'][:12]}.safetensors" and len(memory) == 3
    with pytest.raises(UsageError, match='has no version "4"; it has 1 to 3'):
        registry.pull(f"{CAM}@4", got)
    save_delta(tmp_path / "other.safetensors", delta_of(base="cd", norm__weight=[1.0]))
    with pytest.raises(DeltaError, match="push it to a folder of its own"):
        registry.push(tmp_path / "other.safetensors", CAM)


def test_of_two_pushed_at_the_same_time_both_stay(
    deltas: list[Path], memory: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push(deltas[0], CAM)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "_next", lambda place: stores.Version(1))  # as it was before the other push
        second = registry.push(deltas[1], CAM)
    names = [f"1-{entry['file_sha256'][:12]}" for entry in registry.history(CAM)]
    assert second in names and names == sorted(names, reverse=True)
    with pytest.raises(UsageError, match=f"pushed 2 times at once; choose among @{names[1]} and @{names[0]}"):
        registry.pull(f"{CAM}@1", tmp_path / "got")
    assert registry.pull(f"{CAM}@{second}", tmp_path / "got") == second
    assert (tmp_path / "got").read_bytes() == deltas[1].read_bytes()
    assert registry.pull(CAM, tmp_path / "got") == names[0]
    assert registry.push(f"{CAM}@{names[1]}", CAM) == f"2-{names[1][2:]}"


@pytest.mark.parametrize("remote", [True, False])
def test_who_finds_the_newest_damaged_can_go_back(
    remote: bool, deltas: list[Path], memory: dict[str, Any], tmp_path: Path
) -> None:
    place = CAM if remote else str(tmp_path / "cam1")
    for path in deltas:
        registry.push(path, place)
    cut = deltas[1].read_bytes()[:-1]
    if remote:
        MemoryFileSystem().pipe_file(max(memory), cut)
    else:
        (tmp_path / "cam1/0002.safetensors").write_bytes(cut)
    with pytest.raises(DeltaError, match=r"cam1/0002.*safetensors is not a readable"):
        registry.pull(place, tmp_path / "got")
    assert "is not a readable" in registry.history(place)[0]["error"]
    assert registry.push(f"{place}@1", place).partition("-")[0] == "3"
    registry.pull(place, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == deltas[0].read_bytes()


def test_a_copy_of_a_folder_in_a_store_is_a_history_and_so_the_other_way_round(
    deltas: list[Path], memory: dict[str, Any], tmp_path: Path
) -> None:
    registry.push(deltas[0], f"file://{tmp_path}/here")
    MemoryFileSystem().put(str(tmp_path / "here"), "/site/cam1", recursive=True)
    assert registry.push(deltas[1], CAM).startswith("2-")
    MemoryFileSystem().get("/site/cam1", str(tmp_path / "back"), recursive=True)
    assert registry.push(f"{tmp_path}/back@2", tmp_path / "back") == "3"
    assert [path.name[:4] for path in sorted((tmp_path / "back").iterdir())] == ["0001", "0002", "0003"]


def test_a_server_of_files_shows_a_version_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.Store(LocalFileSystem(), str(tmp_path), "x://")
    commit = LocalFileOpener.commit

    def checked(file: Any) -> None:
        assert store.versions() == []
        commit(file)

    monkeypatch.setattr(LocalFileOpener, "commit", checked)
    assert store.add(b"content").number == 1 and len(store.versions()) == 1


def test_a_store_that_refuses_adds_nothing_and_may_know_no_times(
    deltas: list[Path], memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(kind: type[Exception]) -> Any:
        def refused(*args: Any, **options: Any) -> None:
            raise kind("over\nquota")

        return refused

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", refuse(OSError))
        with pytest.raises(OutputError, match=f"^{CAM}: over quota$"):
            registry.push(deltas[0], CAM)
    assert not memory
    registry.push(deltas[0], CAM)
    monkeypatch.setattr(MemoryFileSystem, "modified", refuse(NotImplementedError))
    assert registry.history(CAM)[0]["pushed"] is None


@pytest.mark.parametrize(
    ("address", "missing", "told"),
    [
        ("nosuch://site/cam1", None, r"fsspec cannot open it \(Protocol not known: nosuch"),
        ("gs://user:secret@bucket/cam1", "gcsfs", r"gs://\*\*\*@bucket/cam1: fsspec cannot open it \(Please"),
        ("s3://bucket/cam1", "fsspec.core", r'needs fsspec; pip install "remtta\[remote\]"'),
        ("ftp://user:secret@127.0.0.1:1/cam1", None, r"ftp://\*\*\*@127.0.0.1:1/cam1: ConnectionRefusedError"),
        ("ftp://user:secret/2@127.0.0.1:1/cam1", None, r"ftp://\*\*\*@127.0.0.1:1/cam1: .*\(ValueError\)"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_without_its_password(
    address: str, missing: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RemttaError, match=told) as raised:
        registry.pull(f"{address}@3", tmp_path / "got")
    assert "secret" not in "".join(traceback.format_exception(raised.value)).replace(f'"{address}', "")


def test_the_commands_with_a_server_of_s3(
    s3: str,
    deltas: list[Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cam, got = "s3://bucket/site/cam1", tmp_path / "got.safetensors"
    capfd.readouterr()
    assert remtta_here("delta", "push", deltas[0], cam) == 0
    assert capfd.readouterr().err.startswith(f"{cam}@1-")
    with ThreadPoolExecutor(2) as pool:  # at the same time
        pushed = list(pool.map(lambda path: registry.push(path, cam), deltas))
    assert remtta_here("delta", "pull", f"{cam}@{pushed[1]}", "-o", got) == 0
    assert got.read_bytes() == deltas[1].read_bytes()
    capfd.readouterr()
    assert remtta_here("delta", "log", cam, "--json") == 0
    assert len(json.loads(capfd.readouterr().out)["versions"]) == 3

    for args in (
        ("push", deltas[0], "s3://nobucket/cam1"),
        ("pull", "s3://nobucket/cam1", "-o", tmp_path / "x.safetensors"),
    ):
        assert refusal_of(capfd, "delta", *args) == (
            *(1, "Error: s3://nobucket/cam1: there is no such bucket; check its name, or make it"),
        )
    assert (
        "s3://bucket/cam2 holds no versions"
        in refusal_of(capfd, "delta", "pull", "s3://bucket/cam2", "-o", tmp_path / "x.safetensors")[1]
    )
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3, "anon": True})
    code, told = refusal_of(capfd, "delta", "pull", cam, "-o", tmp_path / "x.safetensors")
    assert code == 1 and told == f"Error: {cam}: Forbidden"
    assert not (tmp_path / "x.safetensors").exists()
