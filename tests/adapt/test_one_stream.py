import dataclasses
import fcntl
import hashlib
import io
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from remtta import REMConfig, RunOptions, adapt_stream, apply_delta, load_base, load_delta
from remtta.errors import DeltaError, OutputError, StreamError, UsageError
from remtta.interrupts import Interrupts
from remtta.methods import ensemble_rem
from remtta.methods.losses import entropy
from remtta.runs.pipe import RowPipe
from remtta.runs.summary import RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.conftest import NUM_CLASSES, TINY, draw_folder, draw_image, happens, raising, tiny_vit
from tests.records import num_rows, record_of, rows_of
from tests.runs.tiny import fill_disk


class Made(NamedTuple):
    """A run of 12 frames in batches of 5."""

    frames: Path
    run: Path
    model: nn.Module
    summary: RunSummary


OPTIONS: dict[str, Any] = {"config": REMConfig(lr=0.01), "options": RunOptions(batch_size=5, logits=True, seed=5)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root, model = tmp_path_factory.mktemp("made"), tiny_vit()
    frames = draw_folder(root / "frames", range(12), "frame_{}.png")
    return Made(frames, root / "run", model, adapt_stream(model, frames, root / "run", **OPTIONS))


def test_every_frame_is_predicted_in_natural_order_and_the_last_batch_is_smaller(made: Made) -> None:
    frames, run, _, summary = made
    rows = rows_of(run)
    assert [row["source"] for row in rows] == [str(frames / f"frame_{number}.png") for number in range(12)]
    assert [row["index"] for row in rows] == list(range(12))
    assert [row["update"] for row in rows] == [0] * 5 + [1] * 5 + [2] * 2
    assert all(row["adapted"] is True for row in rows)
    assert (summary.num_frames, summary.num_skipped, summary.num_updates) == (12, 0, 3)
    assert summary.exit_reason == "completed"


def test_unreadable_frames_are_reported_in_place_and_never_adapted_on(made: Made, tmp_path: Path) -> None:
    frames = Path(shutil.copytree(made.frames, tmp_path / "frames"))
    (frames / "frame_0b.png").write_text("no image")
    (frames / "frame_6b.jpg").write_bytes(b"")
    whole = (frames / "frame_11.png").read_bytes()
    (frames / "frame_12.png").write_bytes(whole[: len(whole) // 2])
    summary = adapt_stream(tiny_vit(), frames, tmp_path / "run", **OPTIONS)
    rows = rows_of(tmp_path / "run")
    assert [row["index"] for row in rows if "error" in row] == [1, 8, 14]
    assert all(set(row) == {"index", "source", "error"} for row in rows if "error" in row)
    assert (summary.num_frames, summary.num_skipped, summary.num_updates) == (15, 3, 3)
    good = [row for row in rows if "error" not in row]
    assert [row["logits"] for row in good] == [row["logits"] for row in rows_of(made.run)]
    counts = {"frames": 15, "predicted": 12, "skipped": 3, "updates": 3, "not_adapted": 0, "in_order": 0}
    assert record_of(tmp_path / "run")["counts"] == counts


@pytest.mark.parametrize(
    ("batch_size", "told"),
    [
        (12, "all frames fit in one batch, so none was predicted after an update"),
        (6, "only 2 updates on 12 frames, and gains were measured from 4 on"),
        (3, None),
    ],
)
def test_too_few_updates_to_gain_from_are_reported(
    batch_size: int, told: str | None, frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "remtta")
    adapt_stream(tiny_vit(), frames, tmp_path / "run", options=RunOptions(batch_size=batch_size))
    hints = [message for message in caplog.messages if "a smaller --batch-size" in message]
    assert len(hints) == bool(told) and (told or "") in "".join(hints)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_closed_pipe_ends_a_run_by_itself_or_with_the_signal_that_closed_it(
    interrupted: bool, frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signals: list[int] = []

    class Closed(io.BytesIO):
        def write(self, *_: object) -> int:
            if interrupted and not signals:  # Ctrl-C in a pipeline ends its reader, too
                signals.append(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            raise BrokenPipeError

    caplog.set_level(logging.INFO, "remtta")
    given: dict[str, Any] = {"options": RunOptions(batch_size=6), "callbacks": [RowPipe(Closed())]}
    with Interrupts() as interrupts:
        summary = adapt_stream(tiny_vit(), frames, tmp_path / "run", interrupts=interrupts, **given)
    assert summary.exit_reason == ("SIGINT" if interrupted else "closed pipe")
    assert (summary.num_predicted, summary.num_updates) == (6, 1)
    assert "all frames fit in one batch" not in caplog.text


def test_on_error_stop_keeps_what_came_before(vit: nn.Module, frames: Path, tmp_path: Path) -> None:
    (frames / "frame_2b.png").write_text("no image")
    with pytest.raises(StreamError, match=r"frame_2b\.png: not an image .*frame 3"):
        adapt_stream(vit, frames, tmp_path / "run", options=RunOptions(batch_size=5, on_error="stop"))
    assert [row["index"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 3]
    assert record_of(tmp_path / "run")["exit_reason"].startswith("error: ")
    assert load_delta(tmp_path / "run" / "delta.safetensors").frames == 3


def test_the_delta_brings_back_the_adapted_model_and_run_json_says_how(made: Made) -> None:
    delta = load_delta(made.run / "delta.safetensors")
    restored = tiny_vit()
    apply_delta(restored, delta)
    assert all(torch.equal(tensor, made.model.state_dict()[name]) for name, tensor in restored.state_dict().items())
    record = record_of(made.run)
    assert record["adapted"] == sorted(delta.tensors, key=record["adapted"].index)
    assert record["model"]["base_sha256"] == delta.base_sha256
    assert record["method"]["lr"] == 0.01
    assert record["preprocessing"]["input_size"] == [32, 32]
    assert (delta.model, delta.method, delta.frames, delta.updates) == ("unknown", "remtta", 12, 3)


def test_a_delta_of_a_model_from_elsewhere_asks_for_one_like_it(made: Made, checkpoint: Path) -> None:
    delta = load_delta(made.run)
    with pytest.raises(UsageError, match="load_model did not build; name an equal one with --model"):
        load_base(delta)
    given: dict[str, Any] = {"checkpoint": checkpoint, "num_classes": NUM_CLASSES, "model_kwargs": TINY}
    apply_delta(load_base(delta, name="vit_tiny_patch16_224", **given), delta)


def test_starting_from_a_delta_continues_counting_and_the_record_names_it(made: Made, tmp_path: Path) -> None:
    frames, file = made.frames, made.run / "delta.safetensors"
    start = load_delta(file)
    adapt_stream(tiny_vit(), frames, tmp_path / "two", **OPTIONS, delta=start)
    assert [row["update"] for row in rows_of(tmp_path / "two")] == [3] * 5 + [4] * 5 + [5] * 2
    named = {"path": str(file), "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert named.items() <= record_of(tmp_path / "two")["model"]["start_delta"].items()
    assert record_of(tmp_path / "two")["options"]["seed"] == 5
    end = load_delta(tmp_path / "two" / "delta.safetensors")
    assert (end.frames, end.updates) == (24, 6)
    with pytest.raises(DeltaError, match="made on other weights"):
        adapt_stream(tiny_vit(seed=5), frames, tmp_path / "three", delta=start)
    assert not (tmp_path / "three").exists()


def test_reset_every_starts_again_from_the_source(frames: Path, tmp_path: Path) -> None:
    config, options = REMConfig(lr=0.05), RunOptions(batch_size=3, reset_every=6, logits=True)
    adapt_stream(tiny_vit(), frames, tmp_path / "run", config=config, options=options)
    assert [row["update"] for row in rows_of(tmp_path / "run")] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    assert load_delta(tmp_path / "run" / "delta.safetensors").frames == 6
    later, options = [frames / f"frame_{number}.png" for number in range(6, 12)], RunOptions(batch_size=3, logits=True)
    assert adapt_stream(tiny_vit(), later, tmp_path / "fresh", config=config, options=options).num_updates == 2
    again = [row["logits"] for row in rows_of(tmp_path / "run")[6:]]
    assert again == [row["logits"] for row in rows_of(tmp_path / "fresh")]


def test_settings_change_the_methods_own_and_a_config_replaces_them(
    frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, options = tiny_vit(), RunOptions(batch_size=20)
    adapt_stream(model, frames, tmp_path / "own", config={"lr": 0.005}, options=options)
    assert "count as the source weights" not in caplog.text
    adapt_stream(model, frames, tmp_path / "all", config=REMConfig(lr=0.005), options=options)
    assert "now count as the source weights; build the model anew" in caplog.text
    own, whole = (record_of(tmp_path / name)["method"] for name in ("own", "all"))
    assert (own["lr"], own["center"], whole["lr"], whole["center"]) == (0.005, True, 0.005, False)
    with pytest.raises(UsageError, match="tent takes its settings as a TentConfig, got a REMConfig"):
        adapt_stream(tiny_vit(), frames, tmp_path / "tent", method="tent", config=REMConfig())
    bare = nn.Sequential(tiny_vit(), nn.Linear(NUM_CLASSES, 3))
    adapt_stream(bare, frames, tmp_path / "bare", options=options)
    told = "0.225 --interpolation bicubic --crop-pct 0.875 --input-size 32 32; set the values that it was trained with"
    assert "preprocessing is unknown: assuming --mean 0.485 0.456 0.406 --std 0.229 0.224 " + told in caplog.text


def test_a_run_that_no_longer_learns_is_not_reset(frames: Path, tmp_path: Path) -> None:
    run, options = tmp_path / "run", RunOptions(batch_size=3, adapt_for=6, reset_every=6)
    adapt_stream(tiny_vit(), frames, run, config=REMConfig(lr=0.05), options=options)
    assert [row["update"] for row in rows_of(run)] == [0] * 3 + [1] * 3 + [2] * 6


@pytest.mark.parametrize("earlier", [False, True])
def test_a_stop_before_the_first_frame_is_recorded_unless_there_is_an_earlier_run(
    earlier: bool, made: Made, tmp_path: Path
) -> None:
    ended = threading.Event()

    def nothing() -> Iterator[Frame]:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.wait(30)
        yield Frame("late.png", lambda: draw_image(0))

    run = Path(shutil.copytree(made.run, tmp_path / "run")) if earlier else tmp_path / "run"
    with Interrupts() as interrupts:
        options = RunOptions(overwrite=True)
        adapt_stream(tiny_vit(), Stream("late", "folder", nothing()), run, options=options, interrupts=interrupts)
    ended.set()
    if earlier:
        kept = ("run.json", "predictions.jsonl")
        assert all((run / name).read_bytes() == (made.run / name).read_bytes() for name in kept)
    else:
        assert record_of(run)["exit_reason"] == "SIGTERM" and load_delta(run).updates == 0


def test_an_earlier_run_is_overwritten_only_when_asked(made: Made, frames: Path, tmp_path: Path) -> None:
    shutil.copytree(made.run, tmp_path / "run")
    kept = (tmp_path / "run" / "predictions.jsonl").read_bytes()
    with pytest.raises(UsageError, match="holds a run of remtta adapt already"):
        adapt_stream(tiny_vit(), frames, tmp_path / "run")
    assert (tmp_path / "run" / "predictions.jsonl").read_bytes() == kept
    adapt_stream(tiny_vit(), frames, tmp_path / "run", options=RunOptions(batch_size=12, overwrite=True))
    assert record_of(tmp_path / "run")["counts"]["updates"] == 1


def test_a_run_without_a_readable_frame_leaves_no_delta_unless_it_resumes_one(made: Made, tmp_path: Path) -> None:
    broken = [tmp_path / f"broken_{number}.png" for number in range(4)]
    for path in broken:
        path.write_text("no image")
    options = RunOptions(batch_size=2, save_every=1, save_every_s=1e-9)
    with pytest.raises(StreamError, match="no readable frame"):
        adapt_stream(tiny_vit(), broken, tmp_path / "run", options=options)
    assert len(rows_of(tmp_path / "run")) == 4
    assert not list((tmp_path / "run").glob("*.safetensors"))
    whole = [*sorted(made.frames.iterdir())[:4], *broken]
    adapt_stream(tiny_vit(), whole[:4], tmp_path / "more", options=options)
    adapt_stream(tiny_vit(), whole, tmp_path / "more", options=dataclasses.replace(options, resume=True))
    assert load_delta(tmp_path / "more").updates == 2


def test_a_source_without_a_frame_leaves_nothing_behind(vit: nn.Module, tmp_path: Path) -> None:
    def unreachable() -> Iterator[Frame]:
        raise StreamError("the camera cannot be opened")
        yield

    run = tmp_path / "runs" / "run"
    for frames, message in ((unreachable(), "cannot be opened"), (iter(()), "cam: the source has no frames")):
        with pytest.raises(StreamError, match=message):
            adapt_stream(vit, Stream("cam", "camera", frames), run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [1000, 1200, 1400, 1600])  # for rows of frames, or of batches
def test_a_full_disk_keeps_predictions_delta_and_record_in_step(
    room: int, vit: nn.Module, frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def look() -> None:
        assert (run / ".lock").exists()

    fill_disk(monkeypatch, room, look)
    with pytest.raises(OutputError, match=r"s.jsonl cannot be written: No space left on device; free some space and "):
        adapt_stream(vit, frames, run, options=RunOptions(batch_size=1))
    written = len(rows_of(run))
    assert 1 <= written < 12
    assert record_of(run)["counts"]["frames"] == load_delta(run).frames == written
    assert record_of(run)["exit_reason"].endswith("free some space and try again (adapt and eval: with --resume)")
    files = ["batches.jsonl", "delta.safetensors", "events.jsonl", "predictions.jsonl", "run.json"]
    assert sorted(os.listdir(run)) == files


@pytest.mark.parametrize("what", ["delta", "state"])
def test_a_delta_or_state_that_cannot_be_saved_is_no_completed_run_and_costs_nothing_else(
    what: str, vit: nn.Module, frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OutputError(f"{what}.safetensors cannot be written")
    monkeypatch.setattr(f"remtta.runs.saving.save_{what}", raising(refused))
    with pytest.raises(OutputError):
        adapt_stream(vit, frames, tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == 12 and (what == "delta" or load_delta(tmp_path / "run").frames == 12)
    assert record_of(tmp_path / "run")["exit_reason"] == f"error: {what}.safetensors cannot be written"


def test_a_batch_that_is_not_adapted_to_says_so(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = iter((1.0, float("nan"), 1.0))
    monkeypatch.setattr(ensemble_rem, "entropy", lambda logits: entropy(logits) * next(factors))
    adapt_stream(tiny_vit(), frames, tmp_path / "run", options=RunOptions(batch_size=4))
    rows = rows_of(tmp_path / "run")
    assert [row["adapted"] for row in rows] == [True] * 4 + [False] * 4 + [True] * 4
    assert [row["update"] for row in rows] == [0] * 4 + [1] * 8
    delta = load_delta(tmp_path / "run")
    assert (delta.frames, delta.updates) == (8, 2)


def test_a_signal_ends_a_run_whose_reader_is_stuck_after_a_clean_save(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remtta.runs.pipe.PATIENCE_S", 0.2)
    options = RunOptions(batch_size=3, logits=True, topk=7, latency=True)
    adapt_stream(tiny_vit(), frames, tmp_path / "whole", options=options)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)

    def stop() -> None:
        happens(lambda: num_rows(tmp_path / "run") > 0, 15)
        os.kill(os.getpid(), signal.SIGTERM)

    os.write(writing, bytes(4096))  # it is full
    stopper = threading.Thread(target=stop)
    rescuer = threading.Timer(15.0, os.close, (reading,))  # of a test that fails
    with os.fdopen(writing, "wb", buffering=0) as raw, Interrupts() as interrupts:
        stopper.start()
        rescuer.start()
        pipe = io.BufferedWriter(raw)
        more: dict[str, Any] = {"callbacks": [RowPipe(pipe)], "interrupts": interrupts}
        summary = adapt_stream(tiny_vit(), frames, tmp_path / "run", options=options, **more)
        rescuer.cancel()
        assert (summary.exit_reason, summary.signum) == ("SIGTERM", signal.SIGTERM)
        pipe.detach()
    os.close(reading)
    assert summary.num_frames == len(rows_of(tmp_path / "run")) == 3
    assert record_of(tmp_path / "run")["exit_reason"] == "SIGTERM"
    adapt_stream(tiny_vit(), frames, tmp_path / "run", options=dataclasses.replace(options, resume=True))
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
