from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.command import remtta_here
from tests.conftest import TINY_OPTIONS
from tests.records import parsed


def messages(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return standard error as JSON Lines; fail if a line is not JSON."""
    lines = parsed(capfd.readouterr().err)
    assert lines and all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    return lines


def test_messages_are_json_lines(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (frames / "frame_4.png").write_bytes(b"no image")
    args = ["-v", "-b", "4", "-o", str(tmp_path / "run"), "--log-format", "json"]
    assert remtta_here("adapt", frames, *TINY_OPTIONS, "--checkpoint", checkpoint, *args) == 0
    told = messages(capfd)
    assert {line["level"] for line in told} == {"debug", "warning", "info"}
    [skipped] = [line for line in told if line["level"] == "warning"]
    assert skipped["message"].startswith("skipped frame 4, ")
    assert told[-1]["level"] == "info" and told[-1]["message"].startswith("12 frames, 11 predicted, 1 skipped")
    assert all("\n" not in line["message"] for line in told)
    figures = {"frames": 12, "predicted": 11, "skipped": 1, "exit_reason": "completed", "output": str(tmp_path / "run")}
    assert figures.items() <= told[-1].items()


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_a_json_line(debug: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = ["--log-format", "json", *(["--debug"] if debug else [])]
    assert remtta_here("adapt", tmp_path / "nowhere", *args) == 2
    [line] = messages(capfd)
    assert line["level"] == "error" and line["message"].endswith("nowhere: no such file or folder")
    assert ("Traceback" in line.get("traceback", "")) == debug
