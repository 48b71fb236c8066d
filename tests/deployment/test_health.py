import os
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from remtta import RunOptions, adapt_stream
from remtta.deployment.health import Health, HealthFile, check_health_path
from remtta.errors import StreamError, UsageError
from remtta.options import LiveOptions
from remtta.runs.summary import RunSummary
from remtta.streams.live import LiveSource
from remtta.streams.sources import Stream
from tests.conftest import happens, tiny_vit
from tests.records import json_of, num_rows
from tests.runs.tiny import Each
from tests.streams.fakes import FakeCamera, noise, source_of


def test_the_file_is_replaced_whole_again_and_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "health.json", [0]

    def report() -> dict[str, Any]:
        calls[0] += 1
        return {"frames": calls[0]}

    health = HealthFile(path, report, every_s=0.01)
    assert happens(lambda: bool(json_of(path)["frames"] > 5))  # every reading in between was whole, too
    health.close()
    last = json_of(path)
    assert last["frames"] == calls[0] and last["time"].endswith("+00:00")
    assert [entry.name for entry in tmp_path.iterdir()] == ["health.json"]
    assert not any(thread.name == "remtta-health" for thread in threading.enumerate())


def test_a_disk_that_refuses_later_does_not_end_the_run(tmp_path: Path) -> None:
    path, calls = tmp_path / "there" / "health.json", [0]

    def report() -> dict[str, Any]:
        calls[0] += 1
        return {}

    health = HealthFile(path, report, every_s=0.01)
    path.parent.rename(tmp_path / "gone")
    before = calls[0]
    assert happens(lambda: calls[0] > before + 2)  # at least one write has failed by then
    (tmp_path / "gone").rename(path.parent)
    path.unlink()
    assert happens(path.exists)
    health.close()


def test_it_reports_the_state_of_a_live_run(vit: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    camera = FakeCamera([noise(0), noise(1)], [noise(2)])
    seen: list[dict[str, Any]] = []

    def look(wanted: Callable[[dict[str, Any]], bool]) -> None:
        assert happens(lambda: wanted(json_of(path)))
        seen.append(json_of(path))

    def on_batch(summary: RunSummary) -> None:
        if summary.num_frames == 2:
            look(lambda health: bool(health["frames"] == 2))

    def sleep(seconds: float) -> None:  # while the source is lost, in the reader's thread
        look(lambda health: bool(health["state"] == "reconnecting"))

    source = LiveSource(0, LiveOptions(buffer="all", reconnect_for=0.5), connect=camera, sleep=sleep)
    stream = Stream("0", "camera", islice(source.frames(), 3), live_source=source)
    adapt_stream(
        vit, stream, tmp_path / "run", options=RunOptions(batch_size=1), callbacks=[Health(path, 0.01), Each(on_batch)]
    )
    assert {"reconnecting"} <= {health["state"] for health in seen} <= {"running", "reconnecting"}
    last = json_of(path)
    assert last["last_frame"] <= last["time"]
    assert 0 <= last["lag_s"] < 60
    del last["time"], last["last_frame"], last["lag_s"]
    counts = {"frames": 3, "skipped": 0, "updates": 3, "dropped": 0, "gaps": 1}
    assert last == {"state": "completed", "guard": "trust", "guard_alarms": 0, "estimate": None, **counts}


def test_the_end_of_a_run_is_reported_with_its_reason(vit: nn.Module, tmp_path: Path) -> None:
    source = source_of(FakeCamera(None))
    stream = Stream("0", "camera", source.frames(), live_source=source)
    with pytest.raises(StreamError):
        adapt_stream(vit, stream, tmp_path / "run", callbacks=[Health(tmp_path / "h")])
    health = json_of(tmp_path / "h")
    assert health["state"] == "error" and health["reason"].startswith("error: camera 0 cannot be opened")
    assert health["last_frame"] is None


def test_it_may_be_in_the_run_folder_that_is_not_there_yet_under_a_name_of_its_own(
    vit: nn.Module, frames: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "first"
    for name in ("run.json", "mqtt.json", ".lock"):
        with pytest.raises(UsageError, match=f"{name} is a file of the run; choose another name"):
            adapt_stream(vit, frames, run, callbacks=[Health(run / name)])
    with pytest.raises(UsageError, match=r"health is in the run's folder, where its name must end in \.json"):
        adapt_stream(vit, frames, run, callbacks=[Health(run / "health")])
    with pytest.raises(UsageError, match=r"runs: no such folder"):
        adapt_stream(vit, frames, run, callbacks=[Health(tmp_path / "runs" / "health.json")])
    assert not run.parent.exists()
    for resume in (False, True):
        health, options = Health(run / "health.json"), RunOptions(resume=resume)
        adapt_stream(tiny_vit(), frames, run, callbacks=[health], options=options)
        assert json_of(run / "health.json")["state"] == "completed"
    assert num_rows(run) == 12


def test_nothing_but_a_health_file_is_replaced(vit: nn.Module, frames: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"exit_reason": "completed"}')
    (tmp_path / "list.json").write_text('["time", "state"]')
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(frames / "frame_0.png")
    for path in (*map(tmp_path.joinpath, ("run.json", "list.json", "pipe", "link")), Path("/dev/full")):
        before = path.read_bytes() if path.is_file() else path.stat()
        with pytest.raises(UsageError, match=f"--health: {path} is not a health file, and would be replaced; name"):
            adapt_stream(vit, frames, tmp_path / "run", callbacks=[Health(path)])
        assert before == (path.read_bytes() if path.is_file() else path.stat())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [None, "", '{"time": "2026-01-01T00:00:00+00:00", "state": "completed"}\n'])
def test_it_is_written_through_a_link_to_a_file_like_it_or_none(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    if content is not None:
        target.write_text(content)
    check_health_path(link, tmp_path / "run")
    HealthFile(link, lambda: {"state": "running"}).close()
    assert link.is_symlink() and json_of(target)["state"] == "running"
