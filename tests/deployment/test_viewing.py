"""Annotated videos of runs."""

import signal
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import ImageFont

from remtta.deployment.annotated import MIN_WIDTH, TEXT_SIZE, AnnotatedVideo, check_video, predicted_by
from remtta.runs.callbacks import BatchReport
from remtta.runs.summary import RunSummary
from remtta.streams.capture import load_opencv
from remtta.streams.prefetch import DecodedFrame
from tests.command import Started, refusal_of, remtta_here
from tests.conftest import draw_folder, happens
from tests.records import num_rows, rows_of


def pictures_of(path: Path) -> list[np.ndarray[Any, Any]]:
    """Return the frames of a video, as OpenCV reads them."""
    video, frames = load_opencv("reading").VideoCapture(str(path)), []
    while (read := video.read())[0]:
        frames.append(np.asarray(read[1]))
    return frames


def test_a_video_shows_each_frame_above_what_was_said_of_it(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    (frames / "broken.png").write_bytes(b"no picture")
    path = tmp_path / "run" / "out.mp4"
    assert remtta_here("adapt", frames, *tiny, "-o", path.parent, "--annotate", path, "-b", "5") == 0
    pictures = pictures_of(path)
    assert len(pictures) == 12 == len([row for row in rows_of(path.parent) if "class" in row])
    seen, band = pictures[0][:320], pictures[0][320:]
    assert seen.shape == (320, 320, 3) and seen.std() > 10
    assert band.shape[0] == 64 and band.max() > 200 and np.median(band) < 30  # white letters on black
    assert abs(seen.astype(int) - pictures[1][:320]).mean() > 5


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answered_by": "both", "weight": 0.5}, "by both models, 50:50"),
        ({"answered_by": "source"}, "by the source model"),
        ({}, "by the adapted model"),
    ],
)
def test_the_caption_tells_which_model_predicts_and_fits(row: dict[str, Any], told: str) -> None:
    assert predicted_by(row) == told
    assert ImageFont.load_default(TEXT_SIZE).getlength(f"{told}; guard: retired") < MIN_WIDTH - 8


def test_frames_keep_their_times_over_videos_bursts_and_images(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    summary = RunSummary(tmp_path)
    video, image = AnnotatedVideo(Path("12:30.mp4")), torch.zeros(3, 32, 32, dtype=torch.uint8)
    for time_s in (0.0, 0.0001, 0.4, 0.04, 0.08, None, None, 0.0, 0.5):
        frame, row = DecodedFrame(0, "", 0, time_s, image), {"class": 0, "label": None, "prob": 1.0}
        video.on_batch(BatchReport([frame], [row], b"", None, summary))
    video.on_end(summary)
    with av.open(str(tmp_path / "12:30.mp4")) as written:
        times = [round(1000 * frame.time) for frame in written.decode(video=0)]
    assert times == [0, 1, 400, 500, 540, 640, 740, 840, 1340]


def test_a_killed_run_leaves_a_video_but_for_its_last_frame(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    path, run = tmp_path / "out.mp4", tmp_path / "run"
    with Started("adapt", "-", *tiny, "-o", run, "-b", "3", "--annotate", path) as process:
        process.stdin.write("".join(f"{frame}\n" for frame in sorted(frames.iterdir())[:9]).encode())
        assert happens(lambda: num_rows(run) == 9, 100.0)
        assert happens(lambda: len(pictures_of(path)) >= 8)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(pictures_of(path)) in (8, 9) and len(rows_of(run)) == 9


def test_a_run_that_continues_adds_a_video_beside_the_first(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    assert check_video(path, tmp_path / "run", overwrite=False, resume=True) == path
    path.touch()
    assert check_video(path, tmp_path / "run", overwrite=True, resume=False) == path
    assert check_video(path, tmp_path / "run", overwrite=False, resume=True).name == "out-2.mp4"


def test_a_video_that_cannot_be_made_is_reported_in_one_line(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.mp4").touch()
    for name, told in (
        ("x.avi", "must end in .mp4"),
        ("none/x.mp4", "no such folder"),
        ("there.mp4", "choose another --annotate or add --overwrite"),
    ):
        assert told in refusal_of(capfd, "adapt", frames, "-o", tmp_path / "run", "--annotate", tmp_path / name)
    within = draw_folder(tmp_path / "videos", range(2)) / "part.mp4"
    within.write_bytes(b"seen")
    output: list[str | Path] = ["-o", tmp_path / "run", "--annotate"]
    line = refusal_of(capfd, "adapt", within.parent, *output, within, "--overwrite")
    assert f"--annotate {within} would replace its own input {within.parent}" in line
    assert within.read_bytes() == b"seen"
