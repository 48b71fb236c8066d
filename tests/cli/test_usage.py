"""Wrong use is one line; values spread over several words; what a shell completes."""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer

from remtta.cli import app
from remtta.cli.usage import spread_values
from remtta.methods.settings import METHOD_TABLE
from tests.command import remtta_here
from tests.conftest import TINY_OPTIONS
from tests.records import parsed


def test_without_a_command_there_is_help_and_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here() == 2
    out, err = capfd.readouterr()
    assert "Usage: " in out and err == ""


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("--mean 0.5 frames", "--mean 0.5 0.5 0.5 frames"),
        ("--mean=0.5 --std .5 1 1e-3", "--mean 0.5 0.5 0.5 --std .5 1 1e-3"),
        ("--mean 1 2 3 0", "--mean 1 2 3 0"),
        ("--input-size 224 --lr 1", "--input-size 224 224 --lr 1"),
        ("--model-kwargs a=1 b=2 c", "--model-kwargs a=1 --model-kwargs b=2 c"),
        ("--model-kwargs=a=1 b=2", "--model-kwargs a=1 --model-kwargs b=2"),
        ("--model-kwargs depth", "--model-kwargs depth"),
        ("--model-kwargs", "--model-kwargs"),
        ("-- --mean 0.5", "-- --mean 0.5"),
    ],
)
def test_values_are_spread(given: str, spread: str) -> None:
    assert spread_values(given.split()) == spread.split()


def completed(command: str, option: str, incomplete: str) -> list[str]:
    main: Any = typer.main.get_command(app)
    [parameter] = [each for each in main.commands[command].params if each.name == option]
    context = typer.Context(main.commands[command])
    return [item.value for item in parameter.shell_complete(context, incomplete)]


def test_methods_and_scenarios_are_completed() -> None:
    assert completed("adapt", "method", "te") == ["tent", "tent-come"]
    assert set(completed("adapt", "method", "")) == set(METHOD_TABLE) - {"supervised"}
    assert completed("eval", "methods", "source,ten") == ["source,tent", "source,tent-come"]
    assert completed("methods", "name", "sup") == ["supervised"]
    assert completed("eval", "scenario", "t") == ["time-constrained"]


def test_completion_imports_no_torch() -> None:
    code = (
        "import sys\nfrom remtta.cli import app\ntry: app(prog_name='remtta')\n"
        "finally: print(sys.modules.keys() & {'torch', 'numpy', 'yaml'})"
    )
    words = {"_REMTTA_COMPLETE": "complete_bash", "COMP_WORDS": "remtta adapt --method de", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **words})
    assert done.stdout == "deyo\nset()\n"


def test_debug_adds_the_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--debug"]):
        assert remtta_here("adapt", tmp_path / "nowhere", *more) == 2
        told = capfd.readouterr().err
        assert told.startswith("Traceback") == bool(more)
        assert told.splitlines()[-1] == f"Error: {tmp_path / 'nowhere'}: no such file or folder"


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that takes nothing")
def test_help_for_a_reader_that_is_gone_or_full_is_no_traceback() -> None:
    help_all = [sys.executable, "-m", "remtta", "--help-all"]
    with subprocess.Popen(help_all, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()  # as `| head` does
        assert (process.wait(), process.stderr.read()) == (0, b"")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(help_all, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: standard output cannot be written: No space left on device\n")
