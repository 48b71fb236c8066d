"""Many streams on one model: each comes out as if it had been alone, whatever becomes of the others."""

import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from remtta.deployment.group_callback import GroupCallback
from remtta.deployment.health import Health
from remtta.deployment.inspection import inspect_streams
from remtta.deployment.many_streams import adapt_streams
from remtta.deployment.stream_group import StreamGroupSummary
from remtta.deployment.stream_lists import open_streams
from remtta.engines.processes import DIED, WorkersDied
from remtta.errors import OutputError, RemttaError, UsageError
from remtta.interrupts import Interrupts
from remtta.methods.table import METHOD_TABLE
from remtta.models.tensor_files import state_sha256
from remtta.options import RunOptions
from remtta.pipeline.build import AdaptationConfig
from remtta.runs.folder import STREAM_GROUP
from remtta.runs.record import RunRecord
from remtta.runs.summary import RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream, open_stream
from tests.conftest import draw_folder, draw_image, happens, meanwhile, tiny_vit
from tests.records import assert_same_results, json_of, num_rows, record_of, rows_of
from tests.runs.tiny import CONFIGS, GUARD, StopAfter, adapt_tiny, received_frames
from tests.streams.fakes import GATE, FakeCamera, noise, source_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

SIZES = {"gate": 8, "yard": 5, "roof": 11}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("in")
    return {
        name: draw_folder(root / name, range(100 * number, 100 * number + size), "frame_{}.png")
        for number, (name, size) in enumerate(SIZES.items())
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of each by itself."""
    root = tmp_path_factory.mktemp("alone")
    for name, folder in folders.items():
        adapt_tiny(folder, root / name)
    return root


class StopGroupAfter(StopAfter, GroupCallback):
    """Sends SIGTERM after so many batches of all streams."""

    def on_group_batch(self, summary: StreamGroupSummary) -> None:
        self.count()


def adapt_site(streams: Mapping[str, Any], folder: Path, method: str = "rem", **more: Any) -> StreamGroupSummary:
    options = RunOptions(**{"batch_size": 3, "save_every": 2, "guard": GUARD, **more.pop("options", {})})
    opened = {name: each if isinstance(each, Stream) else open_stream(each) for name, each in streams.items()}
    model, config = more.pop("model", None) or tiny_vit(), more.pop("config", None) or CONFIGS[method]
    setup = AdaptationConfig(method, config, options, more.pop("delta", None), more.pop("source_data", None))
    return adapt_streams(model, opened, folder, setup, **more)


@pytest.mark.parametrize(
    ("method", "options"),
    [("rem", {"smooth": "auto", "estimate": 0.9}), ("tent", {"latency": True, "reset_every": 6, "guard": None})],
)
def test_each_stream_is_as_if_it_were_alone(
    method: str, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_vit()
    source, clean = state_sha256(model), folders["roof"] if "estimate" in options else None
    summary = adapt_site(folders, tmp_path / "site", method, model=model, options=options, source_data=clean)
    assert summary.exit_reason == "completed"
    assert caplog.text.count("the estimate is calibrated on only 11 images") == ("estimate" in options)  # not for each
    for name, folder in folders.items():
        adapt_tiny(folder, tmp_path / "alone" / name, method, options=options, source_data=clean)
        assert_same_results(tmp_path / "site" / name, tmp_path / "alone" / name)
    assert state_sha256(model) == source
    told = json_of(tmp_path / "site" / STREAM_GROUP)["streams"]
    assert {name: stream["frames"] for name, stream in told.items()} == SIZES
    assert summary.report().splitlines()[1].startswith("yard  5 frames, 5 predicted, 0 skipped, 2 updates")
    summary.streams["yard"].signum = 15
    assert summary.report().splitlines()[-1] == f"continue with --output {tmp_path / 'site'} --resume"


def test_one_that_dies_and_one_that_stalls_hold_up_nobody(
    folders: dict[str, Path], alone: Path, tmp_path: Path
) -> None:
    shots = [noise(number) for number in range(4)]
    dying = source_of(FakeCamera(shots), reconnect_for=0.02)
    late_camera = FakeCamera([*shots[:1], GATE, *shots])
    late = source_of(late_camera, read_timeout_s=60.0)
    streams = {
        "late": Stream("0", "camera", islice(late.frames(), 5), live_source=late),
        "dying": Stream("1", "camera", dying.frames(), live_source=dying),
        "gate": folders["gate"],
    }
    running: list[str] = []

    def ended(names: Iterable[str]) -> bool:
        told = json_of(tmp_path / "site" / STREAM_GROUP)["streams"]
        running[:] = [name for name, stream in told.items() if stream["exit_reason"] == "running"]
        return not set(running) & set(names)

    def open_the_gate() -> None:
        happens(lambda: (tmp_path / "site" / STREAM_GROUP).exists(), 60)
        happens(lambda: ended(["gate", "dying"]), 60)
        late_camera.captures[0].gate.set()

    with meanwhile(open_the_gate):
        summary = adapt_site(streams, tmp_path / "site")
    assert running == ["late"]
    assert summary.exit_reason == "error: 1 of 3 streams failed"
    assert summary.streams["dying"].exit_reason.startswith("error: camera 0 was lost")
    assert (summary.streams["dying"].num_predicted, summary.streams["late"].num_predicted) == (4, 5)
    assert record_of(tmp_path / "site" / "dying")["exit_reason"] == summary.streams["dying"].exit_reason
    assert_same_results(tmp_path / "site" / "gate", alone / "gate")
    described = inspect_streams(tmp_path / "site").content
    assert described["alive"] is False and described["site"]["streams"]["late"]["frames"] == 5


def test_a_stop_saves_all_and_they_go_on(folders: dict[str, Path], alone: Path, tmp_path: Path) -> None:
    health = tmp_path / "health.json"
    with Interrupts() as interrupts:
        callbacks = [Health(health, 0.01), StopGroupAfter(4)]
        stopped = adapt_site(folders, tmp_path / "site", callbacks=callbacks, interrupts=interrupts)
    assert stopped.exit_reason == "SIGTERM" == json_of(tmp_path / "site" / STREAM_GROUP)["exit_reason"]
    assert 4 <= sum(run.num_updates for run in stopped.streams.values()) < 10
    assert json_of(health)["state"] == "SIGTERM" and "SIGTERM" in {
        each["state"] for each in json_of(health)["streams"].values()
    }
    summary = adapt_site(folders, tmp_path / "site", options={"resume": True})
    assert summary.exit_reason == "completed"
    for name in folders:
        assert_same_results(tmp_path / "site" / name, alone / name)


def test_a_stop_predicts_the_frames_that_wait_in_every_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stopped, received = tiny_vit(), threading.Event(), received_frames(monkeypatch)
    slow.register_forward_pre_hook(lambda *_: time.sleep(0.2))

    def frames() -> Iterator[Frame]:
        yield from (Frame(f"{number}.png", partial(draw_image, number)) for number in range(5))
        stopped.wait(30)

    def stop() -> None:
        assert happens(lambda: received.count(4) == 3, 30)
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(stop), Interrupts() as interrupts:
        streams = {name: Stream(name, "folder", frames()) for name in "abc"}
        adapt_site(streams, tmp_path, "source", model=slow, options={"guard": None}, interrupts=interrupts)
    stopped.set()
    assert [num_rows(tmp_path / name) for name in "abc"] == [5, 5, 5]


def test_a_last_record_that_cannot_be_written_fails_its_stream(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(record: RunRecord) -> None:
        content = record.content()
        if content["source"]["name"].endswith("yard") and content["exit_reason"] == "completed":
            raise OutputError("no space left")
        write(record)

    write = RunRecord.write
    monkeypatch.setattr(RunRecord, "write", full)
    summary = adapt_site(folders, tmp_path)
    assert summary.streams["yard"].exit_reason == "error: no space left"
    assert json_of(tmp_path / STREAM_GROUP)["exit_reason"] == f"error: 1 of {len(folders)} streams failed"


def test_a_damaged_record_is_reported_before_any_work(folders: dict[str, Path], tmp_path: Path) -> None:
    streams = open_streams({name: str(folder) for name, folder in folders.items()})
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "run.json").write_text("{ broken")
    with pytest.raises(RemttaError, match=r"gate/run.json"):
        adapt_site(streams, tmp_path, options={"resume": True}, jobs=2)
    assert not (tmp_path / STREAM_GROUP).exists()


def test_what_cannot_share_a_model_a_worker_or_a_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cotta changes every weight, so the streams of --streams could not share"):
        adapt_site(folders, tmp_path / "site", "cotta", config=METHOD_TABLE["cotta"].config())
    with pytest.raises(UsageError, match="there are no streams"):
        adapt_site({}, tmp_path / "site")
    with pytest.raises(UsageError, match="gate has frames that no worker could read; open it with open_streams"):
        adapt_site(folders, tmp_path / "site", jobs=2)
    assert not (tmp_path / "site").exists()
    adapt_tiny(folders["yard"], tmp_path / "one", "source")
    with pytest.raises(UsageError, match="one holds a run of remtta adapt"):
        adapt_site(folders, tmp_path / "one")


def test_an_error_in_one_update_ends_that_stream_alone(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def frames() -> Iterator[Frame]:
        yield from open_stream(folders["gate"]).frames
        raise ValueError("a bug")

    summary: Mapping[str, RunSummary] = adapt_site(
        {"50% odd": Stream("odd", "folder", frames()), "yard": folders["yard"]}, tmp_path
    ).streams
    assert (summary["50% odd"].exit_reason, summary["yard"].exit_reason) == ("error: ValueError('a bug')", "completed")
    assert "50% odd: ValueError('a bug')" in caplog.messages
    assert len(rows_of(tmp_path / "50% odd")) >= 6


def test_streams_of_a_worker_that_dies_again_and_again_fail_and_the_others_end_well(
    folders: dict[str, Path],
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The workers are this process, but for what reaches them."""

    def in_here(work: Any, shared: Any, tasks: Any, **how: Any) -> Iterator[tuple[int, Any]]:
        if isinstance(failures[-1], WorkersDied):
            how["died"](1, False)
        yield 0, work(pickle.loads(pickle.dumps(shared)), tasks[0], lambda: 0)
        raise failures.pop()

    failures: list[RemttaError] = [OutputError("no space"), WorkersDied(DIED)]

    monkeypatch.setattr("remtta.deployment.worker_pool.in_processes", in_here)
    folders = {**folders, "gate": Path(shutil.copytree(folders["gate"], tmp_path / "gate"))}
    (folders["gate"] / "frame_0.png").write_bytes(b"no picture")
    adapt_site(dict.fromkeys(folders, folders["yard"]), tmp_path / "site", "source")
    streams = open_streams({name: str(folder) for name, folder in folders.items()})
    told: list[int] = []

    class Told(GroupCallback):
        def on_group_batch(self, summary: StreamGroupSummary) -> None:
            told.append(summary.num_frames)

    callbacks = [Health(tmp_path / "health.json"), Told()]
    summary = adapt_site(streams, tmp_path / "site", options={"overwrite": True}, jobs=2, callbacks=callbacks)
    assert summary.exit_reason == "error: 1 of 3 streams failed"
    ends = {
        name: stream["exit_reason"] for name, stream in json_of(tmp_path / "site" / STREAM_GROUP)["streams"].items()
    }
    assert ends == {"gate": "completed", "yard": f"error: {DIED}", "roof": "completed"}
    assert "skipped frame 0" in caplog.text and f"yard: {DIED}" in caplog.messages
    assert told[-1] == SIZES["gate"] + SIZES["roof"]
    assert {name: each["state"] for name, each in json_of(tmp_path / "health.json")["streams"].items()} == {
        "gate": "completed", "roof": "completed"
    }  # fmt: skip
    assert_same_results(tmp_path / "site" / "roof", alone / "roof")

    with pytest.raises(OutputError, match="no space"):
        adapt_site(streams, tmp_path / "site", options={"overwrite": True}, jobs=2)
    assert json_of(tmp_path / "site" / STREAM_GROUP)["streams"]["yard"]["exit_reason"] == "error: no space"


def test_a_worker_that_is_begun_again_continues_with_what_it_began_and_replaces_what_was_there(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(work: Any, shared: Any, tasks: Any, **how: Any) -> Iterator[tuple[int, Any]]:
        for position, task in enumerate(tasks):
            assert shared.options_of(task[1][0]).overwrite
            work(shared, task, lambda: 0)
            assert shared.options_of(task[1][0]).resume
            yield position, work(shared, task, lambda: 0)

    monkeypatch.setattr("remtta.deployment.worker_pool.in_processes", twice)
    streams = open_streams({"yard": str(folders["yard"]), "gate": str(folders["gate"])})
    adapt_site({"yard": folders["roof"]}, tmp_path / "site", "source")
    summary = adapt_site(streams, tmp_path / "site", options={"overwrite": True}, jobs=2)
    assert {name: run.num_frames for name, run in summary.streams.items()} == {"yard": 5, "gate": 8}
    assert [run.num_resumed for run in summary.streams.values()] == [1, 1]
