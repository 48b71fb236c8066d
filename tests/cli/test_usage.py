"""Wrong use is one line; values spread over several words or come from the environment; what is loaded when."""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer

from remtta.cli import running
from remtta.cli.application import app, share_cores
from remtta.cli.running import load_torch
from remtta.cli.usage import spread_values
from remtta.errors import UsageError
from remtta.methods.table import METHOD_TABLE
from remtta.options import ModelOptions
from tests.command import command_line, refusal_of, remtta_here
from tests.records import parsed
from tests.runs.tiny import adapt_tiny


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
    parent = command_line().commands[command]
    [parameter] = [parameter for parameter in parent.params if parameter.name == option]
    return [item.value for item in parameter.shell_complete(typer.Context(parent), incomplete)]


def test_methods_and_scenarios_are_completed() -> None:
    assert completed("adapt", "method", "te") == ["tent", "tent-come"]
    assert set(completed("adapt", "method", "")) == set(METHOD_TABLE) - {"supervised", "light", "centre"}
    assert completed("eval", "methods", "source,ten") == ["source,tent", "source,tent-come"]
    assert completed("methods", "name", "sup") == ["supervised"]
    assert completed("eval", "scenario", "t") == ["time-constrained"]


def test_completion_imports_no_torch() -> None:
    code = (
        "import sys\nfrom remtta.cli.application import app\ntry: app(prog_name='remtta')\n"
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
    frames: Path, tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (frames / "frame_4.png").write_bytes(b"no image")
    assert remtta_here("adapt", frames, *tiny, "-v", "-b", "4", "-o", tmp_path / "run", "--log-format", "json") == 0
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


def test_an_option_that_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"BATCH_SIZE": "20", "GUARD": "off", "LR": "1e-3", "NULL": "true", "SET": "a=1 b=2", "MEAN": ".1 .2 .3"}
    for name, value in {**given, "STD": "0.5", "LIMIT": "", "MASK_RATIOS": "0,0.1", "LAMBDA": "2"}.items():
        monkeypatch.setenv(f"REMTTA_{name}", value)
    values = command_line().commands["adapt"].make_context("adapt", ["x", "--batch-size", "8"]).params
    assert (values["batch_size"], values["action"], values["lr"], values["null"]) == (8, "off", 0.001, True)
    assert (values["pairs"], values["mean"], values["limit"]) == (["a=1", "b=2"], (0.1, 0.2, 0.3), None)
    assert values["std"] == (0.5, 0.5, 0.5)
    assert (values["mask_ratios"], values["ranking_weight"]) == ("0,0.1", 2)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LR", "abc", "REMTTA_LR: Invalid value for '--lr': must be a number"),
        ("RESUME", "3", "REMTTA_RESUME: Invalid value for '--resume': must be true or false"),
        ("MEAN", "1 2", "REMTTA_MEAN: Invalid value for '--mean': 3 values are required, but 2 given"),
        ("GUARD", "on", "REMTTA_GUARD: Invalid value for '--guard': 'on' is not one of"),
    ],
)
def test_what_is_wrong_there_is_reported_in_one_line(
    name: str, value: str, told: str, frames: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"REMTTA_{name}", value)
    assert told in refusal_of(capfd, "adapt", frames)


def test_a_variable_that_is_nearly_an_options_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("REMTTA_BATCHSIZE", "REMTTA_SERVICE_HOST", "REMTTA_CACHE", "REMTTA_LR"):
        monkeypatch.setenv(name, "20")
    with pytest.raises(SystemExit):
        app(["methods", "rem"])
    told = "REMTTA_BATCHSIZE is ignored: no option has this name; did you mean REMTTA_BATCH_SIZE?\n"
    assert capfd.readouterr().err == told


def test_threads_wait_for_each_other_briefly_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, spins in (({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        monkeypatch.setattr(os, "environ", dict(given))
        share_cores()
        assert os.environ.get("GOMP_SPINCOUNT") == spins
        assert "OMP_NUM_THREADS" not in os.environ


def test_a_container_has_threads_for_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remtta.cli.application.usable_cores", lambda: 16)
    monkeypatch.setattr("remtta.cli.application.num_cores", lambda: 2)
    for given, threads in (({}, "2"), ({"OMP_NUM_THREADS": "4"}, "4")):
        monkeypatch.setattr(os, "environ", dict(given))
        share_cores()
        assert os.environ["OMP_NUM_THREADS"] == threads


def test_slow_imports_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    imported: list[str] = []
    monkeypatch.setattr(running, "import_uncollected", lambda module, *more: imported.append(module))
    load_torch("some.module", ModelOptions("vit_tiny_patch16_224"))
    assert caplog.text == "" and imported == ["some.module"]  # torch is there
    monkeypatch.delitem(sys.modules, "torch")
    load_torch("some.module", ModelOptions())
    (tmp_path / "delta.safetensors").touch()
    load_torch("some.module", ModelOptions(), tmp_path)
    told = ["loading torch and vit_base_patch16_224 ...", f"loading torch and the model of {tmp_path} ..."]
    assert caplog.messages == told and len(imported) == 3
    for model, delta in ((ModelOptions(checkpoint="no.pth"), None), (ModelOptions(), tmp_path / "no.safetensors")):
        with pytest.raises(UsageError, match=r"no such (checkpoint|delta) file"):
            load_torch("some.module", model, delta)
    assert len(imported) == 3


WITHOUT_TORCH = """
0 --help
0 methods rem
0 inspect run
2 adapt nowhere
2 adapt . --output .
2 adapt a.png --mask-ratios 0,10
2 adapt a.png --checkpoint no.pth
2 adapt a.png --delta no.safetensors
2 eval nowhere
2 eval . --checkpoint no.pth
2 apply nowhere --output x.safetensors
2 export nowhere --format onnx --output x
2 doctor nowhere
2 bench --methods nothing
2 text-embed --model vit_base_patch16_224 --output x.safetensors
"""


def test_help_inspection_and_wrong_use_are_quick(frames: Path, tmp_path: Path) -> None:
    """Without torch; and `--help` without NumPy, OpenCV and Pillow, too."""
    (tmp_path / "a.png").touch()
    adapt_tiny(frames, tmp_path / "run", "source")
    code = (
        "import sys\nfrom remtta.cli.application import main\nheavy = {'torch', 'numpy', 'cv2', 'PIL'}\n"
        f"for line in {WITHOUT_TORCH.strip().splitlines()!r}:\n"
        "    sys.argv = ['remtta', *line.split()[1:]]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('\\nend', end.code or 0, *heavy & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("end")]
    assert [end[0] for end in ends] == [line.split()[0] for line in WITHOUT_TORCH.strip().splitlines()], done.stderr
    assert ends[0] == ["0"] and not any("torch" in end for end in ends)
