"""A run that was stopped, killed or cut off from power goes on as if nothing had happened."""

import io
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from remtta import REMConfig
from remtta.deltas import DELTA
from remtta.errors import OutputError, RemttaError, UsageError
from remtta.methods.table import method_config
from remtta.models.info import set_labels
from remtta.options import GuardOptions
from remtta.runs.folder import EVENTS, PREDICTIONS, RECORD, STATE, check_same_model
from remtta.runs.pipe import RowPipe
from remtta.runs.saving import load_position, save_state
from remtta.runs.summary import RunProgress
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.conftest import draw_image, tiny_vit
from tests.records import assert_same_results, record_of, rows_of
from tests.runs.tiny import Each, adapt_in_parts, adapt_tiny, assert_goes_on, camera, fill_disk, made_run, stop_after


@pytest.mark.parametrize("method", ["remtta", "tent", "source"])
def test_a_stopped_run_continues_to_the_same_predictions_and_delta(method: str, frames: Path, tmp_path: Path) -> None:
    assert_goes_on(tiny_vit(), frames, tmp_path, method=method)


@pytest.mark.parametrize("kill", range(4))
def test_a_kill_at_any_moment_loses_nothing_and_a_reader_gets_no_row_twice(
    kill: int, frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    run, echo = made_run(frames, tmp_path / "run", f"killed{kill}"), io.BytesIO()
    promised, saved = (run / PREDICTIONS).read_bytes(), load_position(run / STATE, RunProgress)[0].num_bytes
    assert (saved < len(promised)) == (kill in (0, 2))  # before the first save, and between two
    adapt_tiny(frames, run, resume=True, callbacks=[RowPipe(echo)])
    assert f"earlier rows are not sent again; {run / PREDICTIONS} has them all" in caplog.messages
    assert (run / PREDICTIONS).read_bytes() == promised + echo.getvalue()
    assert_same_results(run, frames.parent / "whole")


def test_a_run_over_names_that_are_not_utf8_goes_on(frames: Path, tmp_path: Path) -> None:
    frames = Path(shutil.copytree(frames, tmp_path / "frames"))
    for number, path in enumerate(sorted(frames.glob("*.png"))):
        try:
            path.rename(os.fsdecode(os.fsencode(frames) + b"/%d\xe9.png" % number))
        except OSError:
            pytest.skip("this file system has only UTF-8 names")
    assert_goes_on(tiny_vit(), frames, tmp_path)
    assert all(row["source"].isascii() and row["source_bytes"] for row in rows_of(tmp_path / "through"))


def test_a_run_that_learns_for_some_frames_freezes_at_the_same_one_after_a_stop(frames: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run: dict[str, Any] = {"options": {"adapt_for": 5, "save_every": 2}}
    assert adapt_tiny(frames, whole, **run).num_updates == 2
    assert [row["adapted"] for row in rows_of(whole)] == [True] * 6 + [False] * 6
    assert not any("not_adapted" in row for row in rows_of(whole))
    adapt_in_parts([1, 1], frames, tmp_path / "parts", **run)
    assert_same_results(tmp_path / "parts", whole)
    assert record_of(tmp_path / "parts")["resumed"] == 2
    early = adapt_tiny(frames, tmp_path / "early", options={**run["options"], "flush_after": 0.0})
    assert any(row.get("early") for row in rows_of(tmp_path / "early")) and early.num_updates == 2
    assert [row["adapted"] for row in rows_of(tmp_path / "early")] == [True] * 6 + [False] * 6


def test_a_readable_frame_does_not_wait_behind_any_number_of_unreadable_ones(frames: Path, tmp_path: Path) -> None:
    readable = [str(path) for path in sorted(frames.glob("*.png"))[:5]]
    source = [readable[0], *["absent.png"] * 30, *readable[1:]]
    ends: list[int] = []
    adapt_tiny(source, tmp_path / "whole", "tent", callbacks=[Each(lambda summary: ends.append(summary.num_frames))])
    assert ends == [12, *range(13, 32), 34, 35]  # four times the batch of 3, then each by itself
    for batches in (1, 5):
        stop_after(batches, source, tmp_path / f"{batches}", "tent")
        assert len(rows_of(tmp_path / f"{batches}")) == 11 + batches
        adapt_tiny(source, tmp_path / f"{batches}", "tent", resume=True)
        assert_same_results(tmp_path / f"{batches}", tmp_path / "whole")


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [('"index": 3', '"index": 333', True), ('"adapted": true', '"adapted": true, "early": true', False)],
)
def test_predictions_that_come_out_differently_stay_and_are_reported_unless_early(
    old: str, new: str, reported: bool, frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = made_run(frames, tmp_path / "run")
    (run / STATE).unlink()
    changed = (run / PREDICTIONS).read_text().replace(old, new)
    (run / PREDICTIONS).write_text(changed)
    adapt_tiny(frames, run, resume=True)
    assert (run / PREDICTIONS).read_text() == changed
    assert ("from frame 3 on, some predictions differ" in caplog.text) == reported
    assert ("predictions differ" in caplog.text) == reported


def test_a_finished_run_continues_with_frames_that_were_added(frames: Path, tmp_path: Path) -> None:
    frames = Path(shutil.copytree(frames, tmp_path / "frames"))
    run = tmp_path / "run"
    adapt_tiny(frames, run)
    before, latency_ms = (run / PREDICTIONS).read_bytes(), record_of(run)["timing"]["latency_ms"]
    nothing_new = adapt_tiny(frames, run, resume=True)
    assert latency_ms["p50"] > 0 and record_of(run)["timing"]["latency_ms"] == latency_ms
    assert nothing_new.exit_reason == "completed" and (run / PREDICTIONS).read_bytes() == before
    for number in (12, 13):
        draw_image(number).save(frames / f"frame_{number}.png")
    adapt_tiny(frames, run, resume=True)
    rows = rows_of(run)
    assert [row["index"] for row in rows] == list(range(14))
    assert rows[-1]["update"] == 4 and record_of(run)["counts"]["updates"] == 5
    assert record_of(run)["resumed"] == 2


def named_model() -> nn.Module:
    model = tiny_vit()
    set_labels(model, list("abcdefg"))
    return model


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"config": REMConfig(lr=0.02)}, r"method\.lr was 0\.01, is 0\.02"),
        ({"options": {"batch_size": 4}}, "began with: batch_size was 3, is 4; use the same value again, or choose"),
        ({"options": {"topk": 2}}, "topk was 5, is 2"),
        ({"method": "tent"}, "needs the method that the run began with: it was rem, is tent"),
        ({"model": tiny_vit(seed=5)}, "base_sha256 was"),
        ({"model": named_model()}, r'settings the run began with: labels_sha256 was "[0-9a-f]+'),
    ],
)
def test_other_settings_are_refused_by_name(changes: dict[str, Any], told: str, frames: Path, tmp_path: Path) -> None:
    run = made_run(frames, tmp_path / "run")
    before = (run / PREDICTIONS).read_bytes()
    with pytest.raises(UsageError, match=told):
        adapt_tiny(frames, run, resume=True, **changes)
    assert (run / PREDICTIONS).read_bytes() == before
    assert record_of(run)["exit_reason"] == "completed"


@pytest.mark.parametrize(
    ("method", "guard", "told"),
    [
        ("source", GuardOptions("warn", "both"), None),
        ("lame", GuardOptions("warn"), None),
        ("lame", GuardOptions("off", "both"), 'guard was {"action": "off", "answer": "both"'),
        ("tent", GuardOptions("warn"), 'guard was {"action": "warn"'),
    ],
)
def test_an_option_of_the_guard_that_has_no_effect_need_not_be_given_again(
    method: str, guard: GuardOptions, told: str | None, frames: Path, tmp_path: Path
) -> None:
    config = method_config(method, {}, batch_size=3)
    for options in ({"guard": guard}, {"guard": None}):
        refused = pytest.raises(UsageError, match=re.escape(told)) if told and not options["guard"] else nullcontext()
        with refused:
            adapt_tiny(frames, tmp_path / "run", method, config=config, options=options, resume=True)


def change_record(run: Path, group: str, **entries: Any) -> None:
    """Change entries of a run's record; None removes one, as in the record of a version without it."""
    record = record_of(run)
    content = {**record[group], **entries}
    record[group] = {name: value for name, value in content.items() if name not in entries or value is not None}
    (run / RECORD).write_text(json.dumps(record))


def test_class_names_and_options_that_the_record_does_not_know_are_not_compared(frames: Path, tmp_path: Path) -> None:
    run = made_run(frames, tmp_path / "run")
    change_record(run, "model", labels_sha256=None)
    change_record(run, "options", smooth=None, estimate=None)
    with pytest.raises(UsageError, match='smooth was "off", is "auto"'):
        adapt_tiny(frames, run, resume=True, options={"smooth": "auto"})
    assert adapt_tiny(frames, run, model=named_model(), resume=True).exit_reason == "completed"


def test_another_source_is_refused(frames: Path, tmp_path: Path) -> None:
    run, names = made_run(frames, tmp_path / "run"), [frames / f"frame_{number}.png" for number in range(12)]
    left = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UsageError, match=r"holds 11 frames, and the run had seen 12"):
        adapt_tiny(names[:11], run, resume=True)
    with pytest.raises(UsageError, match=r"frame 11 of .* is .*frame_0\.png, and was .*frame_11\.png"):
        adapt_tiny([*names[:11], names[0]], run, resume=True)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == left


def test_a_run_began_when_its_first_part_did(frames: Path, tmp_path: Path) -> None:
    run, began = made_run(frames, tmp_path / "run", "stopped"), "2026-01-01T00:00:00+00:00"
    change_record(run, "timing", started=began)
    adapt_tiny(frames, run, resume=True)
    assert record_of(run)["timing"]["started"] == began


def test_rows_after_the_last_save_are_counted_by_what_they_say() -> None:
    row = {"source": "camera 0", "frame": 3}
    place = RunProgress(frames=2)
    place.count(
        [{**row, "answered_by": "source"}, {**row, "not_adapted": "black"}, {**row, "error": "x"}, {"gap": True}]
    )
    assert (place.frames, place.by_source, place.not_adapted, place.skipped, place.gaps) == (5, 1, 1, 1, 1)


def test_another_video_of_the_same_name_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def clip(length: int, first: int = 0, stride: int = 1) -> Stream:
        frames = (Frame("clip", partial(draw_image, first + n), number=n * stride) for n in range(length))
        return Stream("clip", "video", frames)

    adapt_tiny(clip(6), tmp_path / "run", "tent")
    adapt_tiny(clip(9), tmp_path / "run", "tent", resume=True)
    assert "another video" not in caplog.text
    adapt_tiny(clip(12, first=50), tmp_path / "run", "tent", resume=True)
    assert "frame 8 of clip is not what it was when the run stopped: is it another video" in caplog.text
    with pytest.raises(UsageError, match=r"is frame 22 of clip, and was frame 11 of clip; give .* and --frame-stride"):
        adapt_tiny(clip(12, stride=2), tmp_path / "run", "tent", resume=True)


def test_a_live_stream_continues_with_what_it_shows_now(tmp_path: Path) -> None:
    run = tmp_path / "run"
    adapt_tiny(camera(9), run, options={"save_every": 2})
    place, state = load_position(run / STATE, RunProgress)
    # As a kill after the third batch would leave it: the save is from after the second.
    size = sum(len(line) + 1 for line in (run / PREDICTIONS).read_text().splitlines()[:6])
    earlier = {"frames": 6, "updates": 2, "num_bytes": size, "rows_sha256": None}
    save_state(run / STATE, {**vars(place), **earlier}, state)
    adapt_tiny(camera(3), run, resume=True, options={"save_every": 2})
    rows = rows_of(run)
    assert [row["index"] for row in rows] == list(range(12))
    assert [row["frame"] for row in rows[9:]] == [0, 1, 2]
    assert record_of(run)["counts"]["frames"] == 12


def test_a_full_disk_keeps_what_was_learned_from_a_live_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, options = tmp_path / "run", {"batch_size": 1, "save_every": 100}
    with monkeypatch.context() as full:
        fill_disk(full, 3000)
        with pytest.raises(OutputError, match="No space left"):
            adapt_tiny(camera(12), run, options=options)
    written = len(rows_of(run))
    assert 2 < written < 12
    assert load_position(run / STATE, RunProgress)[0].updates == written
    adapt_tiny(camera(2), run, resume=True, options=options)
    assert [row["update"] for row in rows_of(run)] == list(range(written + 2))


def test_another_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"model": {"name": "vit_tiny_patch16_224.augreg"}}')
    check_same_model(tmp_path, "vit_tiny_patch16_224")
    with pytest.raises(UsageError, match=r"model.name was vit_tiny_patch16_224.augreg, is remtta-demo"):
        check_same_model(tmp_path, "remtta-demo")


@pytest.mark.parametrize("early", [False, True])
def test_weights_whose_outputs_are_not_finite_are_not_saved(early: bool, tmp_path: Path) -> None:
    failed = threading.Event()  # frame 3 is predicted, early, while the camera waits
    wait = {4: partial(failed.wait, 30)} if early else {}
    options = {"guard": None, "save_every": 9, "flush_after": 0.05 if early else None}
    with pytest.raises(RemttaError, match="not finite numbers from frame 3 on"):
        adapt_tiny(camera(6, wait), tmp_path, config=REMConfig(lr=1e38, optimizer="sgd"), options=options)
    failed.set()
    assert not (tmp_path / STATE).exists() and not (tmp_path / DELTA).exists()
    assert len(rows_of(tmp_path)) == 3 and "not finite" in record_of(tmp_path)["exit_reason"]


@pytest.mark.parametrize("lost", [[STATE, PREDICTIONS, EVENTS], [EVENTS]], ids=["never saved", "events"])
def test_lost_events_and_a_run_that_was_never_saved_end_alike(lost: list[str], frames: Path, tmp_path: Path) -> None:
    made_run(frames, tmp_path / "run", "stopped")
    for name in lost:
        (tmp_path / "run" / name).unlink()
    adapt_tiny(frames, tmp_path / "run", resume=True)
    assert_same_results(tmp_path / "run", frames.parent / "whole")


def test_a_pipe_that_starts_with_other_paths_is_refused_at_the_first(frames: Path, tmp_path: Path) -> None:
    """A live pipe might not come to the last path seen for hours."""
    run = made_run(frames, tmp_path / "run")

    def endless() -> Iterator[Frame]:
        yield Frame(str(frames / "frame_5.png"), partial(draw_image, 5))
        raise AssertionError("read on after another first path")

    with pytest.raises(UsageError, match=r"frame 0 of - is .*frame_5\.png, and was .*frame_0\.png; .* \(sort -V\)"):
        adapt_tiny(Stream("-", "paths", endless()), run, resume=True)
