"""A random sample of frames, to be labelled."""

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from remtta import open_stream
from remtta.interrupts import Interrupts
from remtta.lab.saved_frames import LABELS, SavedFrames
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder, draw_video
from tests.records import assert_same_results, lines_of, rows_of
from tests.runs.tiny import GUARD, StopAfter, adapt_tiny

BOTH = {"guard": GUARD, "batch_size": 4}


def files_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "saved_frames").iterdir())}


def test_a_resumed_run_has_the_same_sample_and_no_other_results(tmp_path: Path) -> None:
    frames = draw_folder(tmp_path / "frames", range(20))
    adapt_tiny(frames, tmp_path / "plain", "remtta", options=BOTH)
    adapt_tiny(frames, tmp_path / "whole", "remtta", options=BOTH, callbacks=[SavedFrames(5)])
    assert_same_results(tmp_path / "whole", tmp_path / "plain")
    whole, run = tmp_path / "whole" / "saved_frames", tmp_path / "stopped"
    with Interrupts() as interrupts:
        stop = [SavedFrames(5), StopAfter(2)]
        adapt_tiny(frames, run, "remtta", options=BOTH, callbacks=stop, interrupts=interrupts)
    for path in whole.glob("*.png"):  # as if it had been killed in a later batch
        if int(path.stem[-6:]) < 16:
            shutil.copy(path, run / "saved_frames")
    (run / "saved_frames" / ".saved_000002.png.99999999.tmp").touch()
    adapt_tiny(frames, run, "remtta", options=BOTH, callbacks=[SavedFrames(5)], resume=True)
    assert files_of(run) == files_of(tmp_path / "whole") and len(files_of(run)) == 5 + 2
    adapt_tiny(frames, tmp_path / "other", "remtta", options=BOTH, callbacks=[SavedFrames(5, seed=1)])
    assert files_of(tmp_path / "other").keys() != files_of(run).keys()


def test_saved_frames_are_what_the_model_sees_with_what_its_source_predicts(tmp_path: Path) -> None:
    video = draw_video(tmp_path / "clip.avi", range(9))
    adapt_tiny(video, tmp_path / "run", "remtta", options=BOTH, callbacks=[SavedFrames(4)])
    adapt_tiny(video, tmp_path / "source", "source")
    expected = {row["index"]: row for row in rows_of(tmp_path / "source")}
    rows = lines_of(tmp_path / "run" / "saved_frames" / "source.jsonl")
    assert len(rows) == 4 and [row["index"] for row in rows] == sorted(row["index"] for row in rows)
    for row in rows:
        assert row["class"] == expected[row["index"]]["class"]
        assert row["prob"] == pytest.approx(expected[row["index"]]["prob"], abs=1e-5)
        seen = np.asarray(Image.open(tmp_path / "run" / "saved_frames" / f"saved_{row['index']:06d}.png"))
        assert seen.shape == (32, 32, 3)
    assert lines_of(tmp_path / "run" / "batches.jsonl")[0].get("source") is None  # it saw shifted copies


def test_the_sample_is_uniform() -> None:
    counts: Counter[int] = Counter()
    for seed in range(1000):
        sample = SavedFrames(4, seed)
        sample._folder = Path("nowhere")
        for index in range(20):
            sample._add(index)
        counts.update(sample._indices)
    # Each of 20 frames is expected in 200 of 1,000 samples of 4, with a standard deviation of 12.6.
    assert counts.total() == 4000 and all(150 < counts[index] < 250 for index in range(20))


def test_classes_stay_in_the_list_and_are_not_overwritten(
    frames: Path, tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = ["adapt", str(frames), *tiny, "-b", "2", "--output", str(run), "--save-frames", "2"]
    assert remtta_here(*command, "--limit", "3") == 0
    labels = run / "saved_frames" / LABELS
    header, first, second = labels.read_text().splitlines()
    assert header == "file\tclass" and all(re.fullmatch(r"saved_00000\d\.png\t", line) for line in (first, second))
    assert remtta_here(*command, "--overwrite") == 0  # nothing is labelled
    lines = labels.read_text().splitlines()
    labels.write_text(labels.read_text().replace(lines[1], f"{lines[1]}3"))
    assert f"{labels} has classes for frames of the run that --overwrite" in refusal_of(capfd, *command, "--overwrite")
    assert remtta_here(*command, "--resume") == 0
    assert labels.read_text().splitlines() == [header, f"{lines[1]}3", *lines[2:]]
    assert remtta_here("score", run, labels) == 0
    said = capfd.readouterr().out
    assert "on 1 labelled frame, source model " in said and "without a class: 1 line" in said


def test_a_sample_that_began_late_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = draw_folder(tmp_path / "frames", range(9))
    with Interrupts() as interrupts:
        adapt_tiny(frames, tmp_path / "run", callbacks=[StopAfter(1)], interrupts=interrupts)
    adapt_tiny(open_stream(frames), tmp_path / "run", callbacks=[SavedFrames(2)], resume=True)
    assert "an earlier part of the run did not save its frames, so the sample is not uniform over" in caplog.text


def test_a_sample_that_paused_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames, run = draw_folder(tmp_path / "frames", range(20)), tmp_path / "run"
    for callbacks in ([SavedFrames(3), StopAfter(1)], [StopAfter(2)]):
        with Interrupts() as interrupts:
            adapt_tiny(frames, run, options=BOTH, callbacks=callbacks, interrupts=interrupts, resume=True)
            assert len(list((run / "saved_frames").glob("*.png"))) == 3
    adapt_tiny(frames, run, options=BOTH, callbacks=[SavedFrames(3)], resume=True)
    assert "not uniform" in caplog.text


def test_with_latency_the_update_is_as_without_the_sample(tmp_path: Path) -> None:
    frames, options = draw_folder(tmp_path / "frames", range(8)), {**BOTH, "latency": True}
    adapt_tiny(frames, tmp_path / "plain", "remtta", options=options)
    adapt_tiny(frames, tmp_path / "run", "remtta", options=options, callbacks=[SavedFrames(3)])
    assert_same_results(tmp_path / "run", tmp_path / "plain")
    assert not (tmp_path / "run" / "saved_frames" / "source.jsonl").exists()
