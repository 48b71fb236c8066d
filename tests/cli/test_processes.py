"""Runs as processes: pipes, signals, and missing standard descriptors."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from remtta import load_delta
from remtta.__main__ import main
from tests.command import Started, without_descriptors
from tests.conftest import draw_folder, happens, raising
from tests.records import num_rows, parsed, record_of, rows_of


def test_a_process_without_standard_descriptors_loses_nothing(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    for more, code in (([], 0), (["--predictions", "-", "--overwrite"], 2)):
        with Started("adapt", frames, *tiny, "-o", tmp_path / "run", *more, before=without_descriptors) as process:
            process.communicate()
            assert process.returncode == code
        assert len(rows_of(tmp_path / "run")) == 12


def test_paths_from_a_pipe_and_predictions_to_a_pipe_and_strange_names_stay_printable(
    frames: Path, tiny: list[str], tmp_path: Path
) -> None:
    strange = draw_folder(tmp_path / "new\nline \x1b[31m", [0], "a.png")
    (strange / "b.png").write_text("no image")
    paths = [frames / "frame_7.png", strange / "a.png", frames / "frame_3.png", strange / "b.png"]
    with Started("adapt", "-", "-0", *tiny, "-b", "2", "-o", tmp_path / "run", "--predictions", "-") as process:
        out, err = process.communicate(b"\0".join(map(os.fsencode, paths)))
        assert process.returncode == 0
    assert [row["source"] for row in parsed(out)] == list(map(str, paths))
    assert out == (tmp_path / "run" / "predictions.jsonl").read_bytes()
    assert b"\x1b[31m" not in out + err


def test_a_reader_that_leaves_ends_the_run_with_0_and_a_save(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    options: list[str | Path] = [*tiny, "-b", "1", "-o", tmp_path / "run", "--predictions", "-"]
    reader, writer = os.pipe()
    with Started("adapt", frames, *options, stdout=writer) as process:
        os.close(writer)
        with open(reader, "rb") as rows:
            assert json.loads(rows.readline())["index"] == 0
        _, stderr = process.communicate()
        assert process.returncode == 0
    assert b"Traceback" not in stderr
    assert record_of(tmp_path / "run")["exit_reason"] == "closed pipe"
    assert load_delta(tmp_path / "run" / "delta.safetensors").updates >= 1


def test_an_interrupt_while_the_command_line_is_loaded_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("remtta.cli.application")
    vars(module)["__getattr__"] = raising(KeyboardInterrupt())  # Ctrl-C is pressed during the import
    monkeypatch.setitem(sys.modules, "remtta.cli.application", module)
    monkeypatch.setattr("os._exit", sys.exit)  # called if another test left a thread
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_a_reader_that_is_still_in_a_call_does_not_abort_the_exit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        print("the last line")
        threading.Thread(target=wanted.wait, daemon=True).start()
        raise SystemExit(130)

    wanted, codes = threading.Event(), list[int]()
    module = ModuleType("remtta.cli.application")
    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "remtta.cli.application", module)
    monkeypatch.setattr("os._exit", codes.append)
    with pytest.raises(SystemExit):
        main()
    wanted.set()
    assert codes == [130] and capfd.readouterr().out == "the last line\n"


def as_shells_do() -> None:
    """Ignore SIGINT, as shells do for background jobs of scripts; the run must stop on it nonetheless."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start_on_stdin(frames: Path, tiny: list[str], run: Path, before: Callable[[], object]) -> Started:
    """Start a run that has predicted four frames and waits for the path of its sixth."""
    process = Started("adapt", "-", *tiny, "-b", "2", "-o", run, before=before)
    process.stdin.write(b"".join(os.fsencode(frames / f"frame_{number}.png") + b"\n" for number in range(5)))
    assert happens(lambda: num_rows(run) >= 4, within_s=60)
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=str)
def test_a_signal_saves_everything_and_exits_with_its_code(
    signum: signal.Signals, frames: Path, tiny: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with start_on_stdin(frames, tiny, run, before=as_shells_do) as process:
        process.send_signal(signum)
        _, stderr = process.communicate()
        assert process.returncode == 128 + signum, stderr
        assert stderr.decode().endswith(f"continue with --output {run} --resume\n")
    rows = rows_of(run)
    assert len(rows) in (4, 5) and all(row["early"] for row in rows[4:])  # the fifth waits for a sixth, or is decoded
    assert not any("early" in row for row in rows[:4])
    assert load_delta(run / "delta.safetensors").updates == 2
    assert record_of(run)["exit_reason"] == signum.name


def test_a_run_under_nohup_outlives_its_terminal(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    as_nohup_does = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with start_on_stdin(frames, tiny, tmp_path / "run", before=as_nohup_does) as process:
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(os.fsencode(frames / "frame_5.png") + b"\n")
        assert process.returncode == 0, stderr
    assert len(rows_of(tmp_path / "run")) == 6


def with_a_full_stderr() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_messages_that_nobody_can_read_do_not_end_a_run(frames: Path, tiny: list[str], tmp_path: Path) -> None:
    (frames / "broken.png").write_text("no image")
    with Started("adapt", frames, *tiny, "-b", "2", "-o", tmp_path / "run", before=with_a_full_stderr) as process:
        assert process.communicate() == (b"", b"") and process.returncode == 0
    assert record_of(tmp_path / "run")["exit_reason"] == "completed"
