"""The loop: predictions before updates, what a stop leaves, no leaks, and that evaluations run through it, too."""

import gc
import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from remtta import adapt_stream, load_delta
from remtta.interrupts import Interrupts
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.trial_writer import delta_path
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.source import SourceConfig
from remtta.methods.table import method_config
from remtta.options import GuardOptions, RunOptions
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.prediction import Update
from remtta.runs.folder import EVENTS, PREDICTIONS, STATE
from remtta.runs.pipe import RowPipe
from remtta.runs.saving import load_position
from remtta.runs.summary import RunProgress, RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.conftest import draw_image, same_tensors, tiny_vit
from tests.lab.evaluation.trees import write_tree
from tests.records import assert_same_results, lines_of, record_of, rows_of
from tests.runs.tiny import Each, adapt_tiny, camera

QUICK = GuardOptions(
    "rollback", window=16, check_every=1, class_history=1, min_frames=4, doubt=1e-6, alarm=2e-6, retries=2
)
METHODS: dict[str, tuple[MethodConfig, GuardOptions | None]] = {
    "rem": (REMConfig(lr=0.01), None),
    "rem+guard": (REMConfig(lr=0.05), QUICK),
    "source": (SourceConfig(), None),
}


@pytest.mark.parametrize("name", METHODS)
def test_an_evaluation_of_one_domain_is_the_run_over_its_images(name: str, tmp_path: Path) -> None:
    config, guard = METHODS[name]
    files = sorted(write_tree(tmp_path / "tree", ["night"], severities=(), each=4).rglob("*.png"))
    run, table = tmp_path / "run", tmp_path / "table"
    plain = name.removesuffix("+guard")
    options = RunOptions(batch_size=5, logits=True, guard=guard)
    adapt_stream(tiny_vit(), [str(file) for file in files], run, method=plain, config=config, options=options)
    dataset = open_dataset(tmp_path / "tree", num_classes=7, labels=None)
    shown = EvalOptions(batch_size=5, order="stored", guard=guard or GuardOptions())
    evaluate(tiny_vit(), dataset, table, methods={name: config}, options=shown)
    for mine, other in zip(rows_of(run), rows_of(table), strict=True):
        same = ("index", "source", "class", "update", "adapted", "answered_by")
        assert [mine.get(key) for key in same] == [other.get(key) for key in same]
        assert [mine[key] for key in ("prob", "entropy")] == pytest.approx([other["prob"], other["entropy"]], abs=1e-6)
    if name == "source":
        return
    first, second = load_delta(run), load_delta(delta_path(table, name, 0))
    assert (first.frames, first.updates) == (second.frames, second.updates)
    assert same_tensors(first.tensors, second.tensors)
    if guard:
        decisions, again = lines_of(run / EVENTS), lines_of(table / EVENTS)
        assert decisions and [(e["frame"] // 5, e["event"]) for e in decisions] == [
            (e["index"] // 5, e["event"]) for e in again
        ]


def stop_in(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Send a signal in the middle of a batch's update, as if it took long."""
    learn, calls = Pipeline.learn, 0

    def slow(pipeline: Pipeline, *args: Any) -> Update:
        nonlocal calls
        calls += 1
        if calls == batch:
            weights = pipeline.method.model.weights.parameters["blocks.0.norm1.weight"]
            weights.data.add_(1.0)  # a step is half done
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(pipeline, *args)

    patch.setattr(Pipeline, "learn", slow)
    patch.setattr("remtta.runs.loop.PATIENCE_S", 0.0)


@pytest.mark.parametrize(("kind", "guarded"), [("folder", False), ("camera", True)])
def test_a_stop_in_a_slow_batch_keeps_what_was_learned_before_it(
    kind: str, guarded: bool, frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    guard = GuardOptions(action="warn", window=16, check_every=1, class_history=1, min_frames=4) if guarded else None

    def go(folder: Path, **more: Any) -> Any:
        options = RunOptions(batch_size=3, guard=guard, save_every=100, **more)
        with Interrupts() as interrupts:
            source = frames if kind == "folder" else camera(12)
            return adapt_stream(
                tiny_vit(), source, folder, config=REMConfig(lr=0.01), options=options, interrupts=interrupts
            )

    go(whole)
    with monkeypatch.context() as patch:
        stop_in(3, patch)
        summary = go(run)
    assert summary.signum == signal.SIGTERM and summary.num_frames == 6 and summary.num_updates == 2
    place, state = load_position(run / STATE, RunProgress)
    assert (place.frames, place.updates) == (6, 2) and state
    delta = load_delta(run)
    assert (delta.updates, delta.frames) == (2, 6)
    with monkeypatch.context() as patch:
        stop_in(1, patch)  # and again, in the first batch of the second part
        assert go(run, resume=True).num_updates == 2
    assert record_of(run)["counts"]["frames"] == len(rows_of(run)) == 6
    go(run, resume=True)
    rows = rows_of(run)
    if kind == "camera":  # its frames began anew, and the updates went on
        assert len(rows) == 18 and [row["update"] for row in rows[6::3]] == [2, 3, 4, 5]
    else:
        assert (run / PREDICTIONS).read_bytes() == (whole / PREDICTIONS).read_bytes()
        assert same_tensors(load_delta(run).tensors, load_delta(whole).tensors)


def test_predictions_are_out_before_the_update_and_stay_the_same(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapt_tiny(frames, tmp_path / "usual", options={"guard": None})
    echo = io.BytesIO()
    out_before: list[int] = []
    learn = Pipeline.learn

    def watched(pipeline: Pipeline, *args: Any) -> Update:
        on_disk = (tmp_path / "early" / PREDICTIONS).read_bytes()
        assert on_disk == echo.getvalue()
        out_before.append(on_disk.count(b"\n"))
        return learn(pipeline, *args)

    monkeypatch.setattr(Pipeline, "learn", watched)
    adapt_tiny(frames, tmp_path / "early", callbacks=[RowPipe(echo)], options={"guard": None, "latency": True})
    usual, early = rows_of(tmp_path / "usual"), rows_of(tmp_path / "early")
    assert out_before == [min(3 * number, len(early)) for number in range(1, len(out_before) + 1)]
    assert [(row["class"], row["update"], row["adapted"]) for row in early] == [
        (row["class"], row["update"], row["adapted"]) for row in usual
    ]
    for row, wanted in zip(early, usual, strict=True):
        assert row["entropy"] == pytest.approx(wanted["entropy"], abs=1e-4)
    assert record_of(tmp_path / "early")["counts"] == record_of(tmp_path / "usual")["counts"]
    assert record_of(tmp_path / "early")["options"]["latency"] is True


def test_low_latency_changes_no_bit_of_a_run_whose_batches_go_in_parts(frames: Path, tmp_path: Path) -> None:
    config = method_config("remtta", {"lr": 0.01, "micro_batch": 2}, batch_size=4)
    guard = GuardOptions("rollback", "both")
    states = []
    for name, latency in (("usual", False), ("early", True)):
        options = {"batch_size": 4, "logits": True, "latency": latency, "guard": guard}
        summary = adapt_tiny(frames, tmp_path / name, "remtta", config=config, options=options)
        assert summary.num_alarms == 0
        states.append(load_position(tmp_path / name / STATE, RunProgress)[1])
    assert_same_results(tmp_path / "early", tmp_path / "usual")
    assert same_tensors(*states)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for open files in /proc")
def test_neither_open_files_nor_objects_grow_with_the_frames(tmp_path: Path) -> None:
    """`REMTTA_FRAMES=20000` looks longer."""
    num_frames = int(os.environ.get("REMTTA_FRAMES", "240"))
    images = [draw_image(number) for number in range(3)]
    frames = (Frame(f"{number}.png", partial(images.__getitem__, number % 3)) for number in range(num_frames))
    seen: list[tuple[int, int]] = []
    gc.freeze()  # what was there before

    def look(summary: RunSummary) -> None:
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), len(gc.get_objects())))

    stream = Stream("many", "folder", frames, num_frames)
    adapt_tiny(stream, tmp_path / "run", callbacks=[Each(look)], options={"batch_size": 20, "smooth": "auto"})
    (early_files, early), (late_files, late) = seen[len(seen) // 2], seen[-1]
    assert late_files <= early_files
    assert late - early < num_frames // 4  # frames, rows or tensors that are kept would be one each, at the least
