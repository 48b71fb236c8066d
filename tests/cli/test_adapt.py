"""The adapt command."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from remtta.cli import progress
from tests.command import refusal_of, remtta_here, terminal_of
from tests.conftest import TINY_OPTIONS, draw_folder, draw_image, draw_video
from tests.records import record_of, rows_of


def test_off_a_terminal_a_line_tells_the_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="remtta")
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with progress.progress("adapting", "frames", hidden=False) as show:
        for now, frames in ((29.0, 50), (31.0, 100), (60.0, 150), (62.0, 200)):  # noqa: B007 - the clock reads it
            show(frames, 500, f"{frames // 50} updates", frames / 10)
    assert caplog.messages == [
        "100 of 500 frames, 2 updates, 10.0 images/s",
        "200 of 500 frames, 4 updates, 20.0 images/s",
    ]


@pytest.mark.parametrize("coloured", [True, False])
def test_on_a_terminal_a_bar_tells_it_without_colours_if_they_are_not_wanted(
    coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "" if coloured else "1")
    terminal = terminal_of(monkeypatch)
    with progress.progress("adapting", "frames", hidden=False) as show:
        show(50, 500, "1 update", 5.0)
    assert "50/500" in terminal.getvalue() and "1 update" in terminal.getvalue()
    assert bool(re.search(r"\x1b\[[\d;]*m", terminal.getvalue())) == coloured


def test_a_seed_decides_every_random_choice(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    options = [*tiny, "-b", "4", "--method", "rem", "--set", "masking=random"]
    for number, seed in enumerate(("0", "7", "7")):
        assert remtta_here("adapt", frames, *options, "--seed", seed, "-o", tmp_path / str(number)) == 0
    first, second, third = (load_file(tmp_path / str(number) / "delta.safetensors") for number in range(3))
    assert all(torch.equal(second[name], third[name]) for name in second)
    assert any(not torch.equal(first[name], second[name]) for name in second)


def test_resume_continues_in_the_folder_it_is_given(
    frames: Path, tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, adapt = tmp_path / "run", ["adapt", str(frames), *tiny, "--batch-size", "4"]
    assert "name it with --output" in refusal_of(capfd, *adapt, "--resume")
    assert remtta_here(*adapt, "--output", run, "--limit", "8", "--resume") == 0
    assert "--resume to continue it" in refusal_of(capfd, *adapt, "--output", run)
    assert remtta_here(*adapt, "--output", run, "--resume") == 0
    assert "resuming" in capfd.readouterr().err
    assert remtta_here(*adapt, "--output", tmp_path / "whole") == 0
    assert (run / "predictions.jsonl").read_bytes() == (tmp_path / "whole" / "predictions.jsonl").read_bytes()


def test_order_weights_and_deadlines_are_those_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    folder, state = draw_folder(tmp_path / "frames", range(3)), load_file(checkpoint)
    for number, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (-number, -number))
    averaged = {name: tensor + 0.1 for name, tensor in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": averaged}, tmp_path / "last.pth.tar")
    weights, video = ("--checkpoint", tmp_path / "last.pth.tar"), draw_video(tmp_path / "clip.avi", range(9))
    runs: dict[str, tuple[Path, list[str]]] = {
        "plain": (folder, []),
        "options": (folder, ["--sort", "mtime", "--use-ema"]),
        "live": (video, ["--realtime", "--batch-size", "1"]),
    }
    for name, (source, options) in runs.items():
        assert remtta_here("adapt", source, *TINY_OPTIONS, *weights, *options, "-o", tmp_path / name) == 0
    records = [record_of(tmp_path / name) for name in runs]
    assert [record["model"]["use_ema"] for record in records] == [False, True, False]
    assert len({record["model"]["base_sha256"] for record in records}) == 2
    assert all({"remtta", "torch", "timm", "python"} <= record["environment"].keys() for record in records)
    plain, reverse, live = (rows_of(tmp_path / name) for name in runs)
    assert [row["source"] for row in reverse] == [row["source"] for row in reversed(plain)]
    assert live[0]["adapted"] and records[2]["options"]["realtime"]


def test_guard_stop_ends_with_its_own_exit_code(tiny: list[str], tmp_path: Path) -> None:
    draw_folder(tmp_path / "long", range(48))
    options = ["--batch-size", "6", "--lr", "0.9", "--anchor", "0", "-q", "--guard", "stop", "--guard-retries", "0"]
    adapt: list[str | Path] = ["adapt", tmp_path / "long", *tiny, *options, "--output", tmp_path / "stop"]
    assert remtta_here(*adapt) == 5
    record = record_of(tmp_path / "stop")
    assert record["exit_reason"] == "guard" and record["guard"]["retired"]
    before = rows_of(tmp_path / "stop")
    assert len(before) == 6  # the batch whose update moved the weights too far
    assert remtta_here(*adapt, "--resume") == 5
    assert rows_of(tmp_path / "stop") == before


def test_an_empty_list_is_no_failure(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("remtta.streams.sources.read_paths", lambda descriptor, null_separated: iter(()))
    before = set(tmp_path.iterdir())
    assert remtta_here("adapt", "-", *tiny) == 0
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.endswith("the list of frames is empty: nothing to do, and no run folder is left\n")
    assert remtta_here("adapt", "-", *tiny, "--resume", "-o", "run", "-q", "--predictions", "-") == 0
    assert capfd.readouterr() == ("", "")
    assert set(tmp_path.iterdir()) == before


def test_the_folder_that_was_chosen_is_the_only_line_on_standard_output(
    frames: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*tiny, "--method", "source"]
    assert remtta_here("adapt", frames, *options) == 0
    [line] = capfd.readouterr().out.splitlines()
    assert Path(line).parent == Path("runs") and record_of(Path(line))["exit_reason"] == "completed"
    for args, out in ((["-q"], 0), (["-o", "run"], 0), (["--predictions", "-"], 12)):
        assert remtta_here("adapt", frames, *options, *args) == 0
        assert capfd.readouterr().out.count("\n") == out


def test_an_answer_and_a_guard_without_effect_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw_image(0).save(tmp_path / "a.png")
    options = ("--model", "remtta-demo", "-o", tmp_path / "run", "--method", "source")
    assert remtta_here("adapt", tmp_path / "a.png", *options, "--answer", "both", "--guard", "stop") == 0
    told = capfd.readouterr().err
    assert "--answer both has no effect on --method source" in told
    assert "--guard stop has no effect" in told and "1 frame, 1 predicted, 0 skipped, 0 updates" in told


def test_a_folder_of_other_files_is_no_output(frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refusal_of(capfd, "adapt", frames, "--model", "remtta-demo", "--output", frames)
    assert "frames is not empty (frame_0.png, ...) and holds no earlier run" in line
    (tmp_path / "run").mkdir()
    for name in (".hidden", "health.json"):
        (tmp_path / "run" / name).touch()
    assert remtta_here("adapt", frames, "--model", "remtta-demo", "--limit", "1", "--output", tmp_path / "run") == 0
