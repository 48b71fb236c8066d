from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remtta import RunOptions, adapt_stream, load_delta, load_model
from remtta.files import FolderLock
from remtta.methods.settings import METHOD_CONFIGS, METHOD_SUMMARIES
from tests.conftest import NUM_CLASSES, TINY, TINY_OPTIONS, draw_image, random_images, tiny_vit

REMTTA = [sys.executable, "-m", "remtta"]


def remtta(
    *args: str | Path, cwd: Path | None = None, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*REMTTA, *map(str, args)], cwd=cwd, input=stdin, capture_output=True, timeout=120, check=False
    )


def remtta_here(*args: str | Path) -> int:
    """The exit code of a command run in this process: no new torch to import."""
    from remtta.cli import app, spread_model_kwargs

    with pytest.raises(SystemExit) as exit_:
        app(spread_model_kwargs([str(arg) for arg in args]))
    return int(exit_.value.code or 0)


def rows_of(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from remtta.cli import app; app(['--help'], standalone_mode=False); "
        "print(sys.modules.keys() & {'torch', 'numpy', 'cv2', 'PIL'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("command", ["adapt", "eval", "apply", "inspect", "corrupt", "demo", "methods", "bench"])
def test_every_command_has_help_with_an_example(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here(command, "--help") == 0
    text = capfd.readouterr().out
    assert re.search(rf"remtta {command}( \S|\n)", text)
    assert "Example" in text


def test_version_names_everything_on_one_line() -> None:
    done = remtta("--version")
    assert re.fullmatch(rb"remtta \S+, torch \S+, timm \S+, \w+\n", done.stdout)


def test_adapt_apply_and_inspect(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, labels = tmp_path / "run", tmp_path / "labels.txt"
    labels.write_text("".join(f"name {number}\r\n" for number in range(NUM_CLASSES)), newline="")
    options: list[str | Path] = [
        *TINY_OPTIONS,
        "--checkpoint",
        checkpoint,
        "--labels",
        labels,
        "--batch-size",
        "5",
        "--lr",
        "0.01",
    ]
    assert remtta_here("adapt", frames, *options, "--output", run, "--logits") == 0
    assert capfd.readouterr().out == ""
    rows = rows_of((run / "predictions.jsonl").read_bytes())
    assert len(rows) == 12
    assert rows[0]["label"] == f"name {rows[0]['class']}"
    assert sum(entry["prob"] for entry in rows[0]["topk"]) <= 1.00001

    whole = tmp_path / "adapted.safetensors"
    assert remtta_here("apply", run / "delta.safetensors", "--checkpoint", checkpoint, "--output", whole) == 0
    base, state = load_file(checkpoint), load_file(whole)
    assert {name: t.dtype for name, t in state.items()} == {name: t.dtype for name, t in base.items()}
    changed = {name for name in base if not torch.equal(base[name], state[name])}
    assert changed == set(load_delta(run / "delta.safetensors").tensors)
    model = load_model(
        "vit_tiny_patch16_224", checkpoint=whole, num_classes=NUM_CLASSES, model_kwargs=TINY, labels=None
    )
    expected = tiny_vit()
    with torch.no_grad():
        for name, change in load_delta(run / "delta.safetensors").tensors.items():
            parameter = expected.get_parameter(name)
            parameter.add_(change)
        assert torch.equal(model(random_images(4)), expected(random_images(4)))

    assert remtta_here("inspect", run) == 0
    text = capfd.readouterr().out
    assert "blocks.2.norm2" in text
    assert "12" in text
    assert remtta_here("inspect", run, "--json") == 0
    content = json.loads(capfd.readouterr().out)
    assert content["predictions"]["predicted"] == 12
    assert content["delta"]["parameters"] == 3 * 2 * 2 * 48
    assert remtta_here("inspect", run / "delta.safetensors") == 0
    assert "3 updates on 12 frames since the source weights" in capfd.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")
def test_inspect_tells_a_killed_run_from_a_live_one(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    adapt_stream(tiny_vit(), frames, run, options=RunOptions(batch_size=4, max_ms=1e-3))
    record = (run / "run.json").read_text()
    (run / "run.json").write_text(record.replace('"exit_reason": "completed"', '"exit_reason": "running"'))
    lock = FolderLock(run)
    assert remtta_here("inspect", run) == 0
    told = capfd.readouterr().out
    assert told.startswith("run          running; started")
    assert "1 updates; 8 not adapted on\n" in told
    lock.release()
    assert remtta_here("inspect", run) == 0
    assert capfd.readouterr().out.startswith("run          was killed, and --resume goes on with it; started")
    (run / "run.json").write_text(record)
    assert remtta_here("inspect", run, "--json") == 0
    assert json.loads(capfd.readouterr().out)["alive"] is False


def test_a_delta_brings_its_model_along(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert remtta_here("adapt", frames, *TINY_OPTIONS, "--checkpoint", checkpoint, "-o", first, "-b", "4") == 0
    assert remtta_here("adapt", frames, "--delta", first, "-o", second, "-b", "4") == 0
    assert rows_of((second / "predictions.jsonl").read_bytes())[0]["update"] == 3
    model = json.loads((second / "run.json").read_text())["model"]
    assert model["checkpoint"] == str(checkpoint)
    assert model["model_kwargs"] == TINY
    assert remtta_here("apply", second, "-o", tmp_path / "whole.safetensors", "--device", "cpu") == 0
    for needed in (checkpoint, second / "delta.safetensors"):
        before = needed.read_bytes()
        assert remtta_here("apply", second, "-o", needed, "--overwrite") == 2
        assert needed.read_bytes() == before
    assert remtta_here("apply", second, "--model", "vit_small_patch16_224", "-o", tmp_path / "x.safetensors") == 4
    assert "the delta was made on vit_tiny_patch16_224, not on vit_small" in capfd.readouterr().err
    assert remtta_here("apply", second, "-o", tmp_path / "x.safetensors", "--device", "tpu") == 2
    assert "tpu" in capfd.readouterr().err

    checkpoint.rename(tmp_path / "moved.safetensors")
    assert remtta_here("apply", second, "-o", tmp_path / "again.safetensors") == 2
    assert "which is not there; name that file with --checkpoint" in capfd.readouterr().err


def test_a_delta_brings_its_preprocessing_and_names_its_checkpoint_from_anywhere(
    frames: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*TINY_OPTIONS, "--checkpoint", "tiny.safetensors", "--mean", "0.1", "0.2", "0.3"]
    assert remtta_here("adapt", "frames", *options, "-o", "first") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert remtta_here("adapt", "../frames", "--delta", "../first", "-o", "second") == 0
    preprocessing = json.loads((tmp_path / "elsewhere" / "second" / "run.json").read_text())["preprocessing"]
    assert preprocessing["mean"] == [0.1, 0.2, 0.3]


def test_the_embedded_model_is_a_model_like_any_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw_image(0).save(tmp_path / "a.png")
    run = tmp_path / "run"
    assert remtta_here("adapt", tmp_path / "a.png", "--model", "remtta-demo", "-o", run, "--verbose") == 0
    assert "rem adapts 24 tensors, blocks.0.norm1.weight, " in capfd.readouterr().err
    assert remtta_here("apply", run, "-o", tmp_path / "whole.safetensors") == 0


def test_a_process_without_standard_descriptors_loses_nothing(frames: Path, checkpoint: Path, tmp_path: Path) -> None:
    options = " ".join([*TINY_OPTIONS, "--checkpoint", str(checkpoint), "--output", "run"])
    for more, code in (("", 0), ("--predictions - --overwrite", 2)):
        script = f"{sys.executable} -m remtta adapt {frames} {options} {more} <&- >&- 2>&-"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, timeout=120, check=False)
        assert done.returncode == code
        assert len(rows_of((tmp_path / "run" / "predictions.jsonl").read_bytes())) == 12


def test_off_a_terminal_a_line_tells_the_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from remtta.cli import progress
    from remtta.runs.adapt import RunSummary
    from remtta.runs.place import Place

    caplog.set_level("INFO", logger="remtta")
    clock = iter((0.0, 29.0, 31.0, 31.0, 60.0, 62.0, 62.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress.progress(500, hidden=False) as advance:
        for frames in (50, 100, 150, 200):
            advance(RunSummary(Path("run"), Place(frames=frames, updates=frames // 50, seconds=10)))
    assert caplog.messages == [
        "100 of 500 frames, 2 updates, 10.0 images/s",
        "200 of 500 frames, 4 updates, 20.0 images/s",
    ]


def test_paths_from_a_pipe_and_predictions_to_a_pipe(frames: Path, checkpoint: Path, tmp_path: Path) -> None:
    options: list[str | Path] = [
        *TINY_OPTIONS,
        "--checkpoint",
        checkpoint,
        "--batch-size",
        "4",
        "--output",
        tmp_path / "run",
    ]
    paths = b"\0".join(os.fsencode(frames / f"frame_{number}.png") for number in (7, 3, 11))
    done = remtta("adapt", "-", "-0", *options, "--predictions", "-", stdin=paths)
    assert done.returncode == 0
    assert [row["source"][-12:] for row in rows_of(done.stdout)] == ["/frame_7.png", "/frame_3.png", "frame_11.png"]
    assert done.stdout == (tmp_path / "run" / "predictions.jsonl").read_bytes()


def test_a_reader_that_leaves_ends_the_run_with_0_after_a_clean_save(
    frames: Path, checkpoint: Path, tmp_path: Path
) -> None:
    options = " ".join([*TINY_OPTIONS, "--checkpoint", str(checkpoint), "--batch-size", "1", "--output", "run"])
    script = f"{sys.executable} -m remtta adapt {frames} {options} --predictions - | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert json.loads(lines[0])["index"] == 0
    assert lines[1] == b"0"
    assert b"Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_reason"] == "closed pipe"
    assert load_delta(tmp_path / "run" / "delta.safetensors").updates >= 1


def start_on_stdin(frames: Path, checkpoint: Path, run: Path, hangup: signal.Handlers) -> subprocess.Popen[bytes]:
    """A run that has predicted four frames and waits for the path of its sixth."""
    command = [*REMTTA, "adapt", "-", *TINY_OPTIONS, "--checkpoint", str(checkpoint), "-b", "2", "-o", str(run)]

    def as_shells_do() -> None:
        # The shell of a script starts background jobs with SIGINT ignored; the run must stop on it all the same.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, hangup)

    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=as_shells_do)
    assert process.stdin is not None
    process.stdin.write(b"".join(os.fsencode(frames / f"frame_{number}.png") + b"\n" for number in range(5)))
    process.stdin.flush()
    wait_for_lines(run / "predictions.jsonl", 4)
    return process


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_a_signal_saves_everything_and_exits_with_its_code(
    signum: signal.Signals, code: int, frames: Path, checkpoint: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start_on_stdin(frames, checkpoint, run, hangup=signal.SIG_DFL)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert len(rows_of((run / "predictions.jsonl").read_bytes())) == 4
    assert load_delta(run / "delta.safetensors").updates == 2
    assert json.loads((run / "run.json").read_text())["exit_reason"] == signum.name


def test_a_run_under_nohup_outlives_its_terminal(frames: Path, checkpoint: Path, tmp_path: Path) -> None:
    process = start_on_stdin(frames, checkpoint, tmp_path / "run", hangup=signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(os.fsencode(frames / "frame_5.png") + b"\n", timeout=60)
    assert process.returncode == 0, stderr
    assert len(rows_of((tmp_path / "run" / "predictions.jsonl").read_bytes())) == 6


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{path} never got {count} lines"
        time.sleep(0.05)


def _errors() -> list[Any]:
    tiny = [*TINY_OPTIONS, "--checkpoint", "tiny.safetensors"]
    other = [part if part != str(NUM_CLASSES) else "9" for part in tiny]
    return [
        (["adapt", "nowhere"], 2, "nowhere: no such file or folder"),
        (["adapt", "empty"], 1, "empty: no images or videos in this folder or below it"),
        (["adapt", "*.gif"], 2, "*.gif: no file matches"),
        (["adapt", "text.mp4", *tiny], 1, "text.mp4 cannot be opened as a video"),
        (["adapt", "text.jpg", *tiny, "-o", "text"], 1, "none of 1 frame(s) could be read"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_225"], 2, "did you mean vit_tiny_patch16_224"),
        (
            ["adapt", "frames", "--model", "resnet18"],
            1,
            "resnet18 cannot be adapted: REM adapts timm VisionTransformer",
        ),
        (["adapt", "frames", "--model", "resnet18", "--checkpoint", "tiny.safetensors"], 1, "and ResNet is none"),
        (["eval", "frames", "--model", "resnet18"], 1, "and ResNet is none"),
        (["adapt", "frames", *tiny, "--mask-ratios", "0.1,0.2"], 2, "mask ratios must start with 0"),
        (["adapt", "frames", *tiny, "--mask-ratios", "x"], 2, "--mask-ratios takes numbers"),
        (["adapt", "frames", *tiny, "--lr", "0"], 2, "learning rate must be > 0"),
        (["adapt", "frames", *tiny, "--adapt-layers", "0-9"], 2, "no block 9: the model has blocks 0-3"),
        (["adapt", "frames", *tiny, "--mask-ratios", "0,0.999"], 2, "leaves none of 64 patch tokens"),
        (["adapt", "frames", "--model", "local-dir:nowhere"], 2, "no such folder with a config.json"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_224.x"], 2, "choose vit_tiny_patch16_224.augreg"),
        (["adapt", "frames", *tiny, "--predictions", "out.jsonl"], 2, "--predictions takes -"),
        (["adapt", "frames", *tiny, "--model-kwargs", "depth"], 2, "takes key=value pairs"),
        (["adapt", "frames", *tiny, "--labels", "nowhere.txt"], 2, "nowhere.txt"),
        (["adapt", "frames", *tiny, "--labels", "text.jpg"], 2, "names 1 classes, but the model has 7"),
        (["adapt", "frames", *tiny, "--device", "cuda:99"], 2, "is not available"),
        (["adapt", "frames", *tiny, "--output", "text.jpg"], 2, "text.jpg is a file"),
        (["adapt", "frames", *tiny, "--delta", "nowhere.safetensors"], 2, "no such delta file"),
        (["adapt", "frames", *tiny, "--delta", "tiny.safetensors"], 4, "not a remtta delta"),
        (["adapt", "frames", *tiny, "--delta", "text.jpg"], 4, "not a readable safetensors file"),
        (["adapt", "frames", *other], 4, "the file has 7 classes: see --num-classes"),
        (["adapt", "frames", *tiny, "--model-kwargs", "depth=5"], 4, "missing in the file: blocks.4"),
        (["adapt", "frames", *tiny[:-1], "text.jpg"], 4, "not a readable PyTorch checkpoint"),
        (["adapt", "frames", *tiny[:-1], "nowhere.pth"], 2, "no such checkpoint file"),
        (["apply", "text.jpg", "-o", "out.safetensors"], 4, "not a readable safetensors file"),
        (["apply", "tiny.safetensors", "-o", "out.pth"], 2, "must end in .safetensors"),
        (["inspect", "nowhere"], 2, "nowhere: no such file or folder"),
        (["inspect", "empty"], 2, "empty holds no run"),
        (["inspect", "."], 2, "there are runs in below"),
        (["adapt", "frames", *tiny, "--seed", "-1"], 2, "seed must be from 0 to 2^63 - 1, got -1"),
        (["adapt", "frames", "--model", "remtta-demo", "--num-classes", "9"], 2, "remtta-demo is one fixed model"),
        (["adapt", "frames", *tiny, "--mean", "124", "116", "104"], 2, "mean is for pixels in [0, 1]"),
        (["apply", "empty", "-o", "out.safetensors"], 2, "empty/delta.safetensors: no such delta file"),
        (
            ["adapt", "http://127.0.0.1:9/x", *tiny],
            1,
            "http://127.0.0.1:9/x cannot be opened as a video (the connection",
        ),
        (["adapt", "htp://me:key@host/x"], 2, 'htp://***@host/x: unknown protocol "htp"; use rtsp://, http://'),
    ]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    _errors(),
    ids=lambda value: "-".join(value[:2] + value[-1:]) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(
    args: Sequence[str],
    code: int,
    text: str,
    frames: Path,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "run.json").write_text("{}")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "text.jpg").write_text("no image")
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    exit_code = remtta_here(*args)
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
    assert exit_code == code, captured.err
    assert len(errors) == 1
    assert text in errors[0]
    assert captured.out == ""
    made = {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before}
    assert made <= {"text"}


def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import pickle

    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    (tmp_path / "trap.pth").write_bytes(pickle.dumps({"state_dict": Trap()}))
    torch.save({"state_dict": Trap()}, tmp_path / "trap2.pth")
    for name in ("trap.pth", "trap2.pth"):
        assert remtta_here("adapt", frames, *TINY_OPTIONS, "--checkpoint", tmp_path / name) == 4
        assert "could run code, so it was not loaded" in capfd.readouterr().err
    assert not marker.exists()


def test_apply_refuses_another_base_and_writes_nothing(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    save_file(tiny_vit(seed=9).state_dict(), tmp_path / "other.safetensors")
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--output", tmp_path / "run"]
    assert remtta_here("adapt", frames, *options) == 0
    delta, out = tmp_path / "run" / "delta.safetensors", tmp_path / "out.safetensors"
    assert remtta_here("apply", delta, "--checkpoint", tmp_path / "other.safetensors", "--output", out) == 4
    assert "the delta was made on other weights" in capfd.readouterr().err
    assert not out.exists()


def test_a_folder_name_with_strange_characters_stays_printable(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new\nline \x1b[31m"
    folder.mkdir()
    draw_image(0).save(folder / "a.png")
    (folder / "b.png").write_text("no image")
    done = remtta("adapt", folder, *TINY_OPTIONS, "--checkpoint", checkpoint, "--output", tmp_path / "run")
    assert done.returncode == 0
    assert b"\x1b[31m" not in done.stderr
    rows = rows_of((tmp_path / "run" / "predictions.jsonl").read_bytes())
    assert [row["source"] for row in rows] == [str(folder / "a.png"), str(folder / "b.png")]


def test_methods_are_listed_with_their_settings(capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("methods") == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == list(METHOD_CONFIGS)
    assert remtta_here("methods", "rem") == 0
    told = capfd.readouterr().out
    assert "  mask_ratios = 0,0.1,0.2\n      Fractions of patch tokens to leave out" in told
    assert "None for the first three quarters" in " ".join(told.split())
    assert remtta_here("methods", "tent") == 0
    assert "0.001 at a batch of 64" in capfd.readouterr().out
    assert remtta_here("methods", "tenth") == 2
    assert set(METHOD_SUMMARIES) == set(METHOD_CONFIGS)


@pytest.mark.parametrize("method", METHOD_CONFIGS)
def test_every_setting_of_a_method_is_explained_and_used(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("methods", method) == 0
    lines = capfd.readouterr().out.splitlines()[2:]
    names = [line.split()[0] for line in lines if re.match(r"  \w+ = ", line)]
    kind = METHOD_CONFIGS[method]
    assert names == [field.name for field in dataclasses.fields(kind) if field.name not in kind.unused]
    for number, line in enumerate(lines):
        if re.match(r"  \w+ = ", line):
            assert len(lines[number + 1].strip()) > 10, line
    assert ("lr" in names) == (method not in ("source", "lame", "foa"))


def test_one_model_kwargs_option_takes_several_pairs() -> None:
    from remtta.cli import spread_model_kwargs

    args = ["adapt", "--model-kwargs", "img_size=32", "depth=6", "frames", "--lr", "1"]
    expected = ["adapt", "--model-kwargs", "img_size=32", "--model-kwargs", "depth=6", "frames", "--lr", "1"]
    assert spread_model_kwargs(args) == expected


def test_resume_goes_on_in_the_folder_it_is_given(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--batch-size", "4"]
    run = tmp_path / "run"
    assert remtta_here("adapt", frames, *options, "--resume") == 2
    assert "name it with --output" in capfd.readouterr().err
    assert remtta_here("adapt", frames, *options, "--output", run, "--limit", "8", "--resume") == 0
    assert remtta_here("adapt", frames, *options, "--output", run) == 2
    assert "--resume to go on with it" in capfd.readouterr().err
    assert remtta_here("adapt", frames, *options, "--output", run, "--resume") == 0
    assert "going on with" in capfd.readouterr().err
    assert remtta_here("adapt", frames, *options, "--output", tmp_path / "whole") == 0
    assert (run / "predictions.jsonl").read_bytes() == (tmp_path / "whole" / "predictions.jsonl").read_bytes()


def test_guard_stop_ends_with_its_own_exit_code(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    for number in range(60):
        draw_image(number).save(folder / f"{number}.png")
    options = [*TINY_OPTIONS, "--checkpoint", str(checkpoint), "--batch-size", "6", "--lr", "0.9", "-q"]
    stopping = ("--guard", "stop", "--guard-retries", "0")
    assert remtta_here("adapt", folder, *options, "--output", tmp_path / "stop", *stopping) == 5
    record = json.loads((tmp_path / "stop" / "run.json").read_text())
    assert record["exit_reason"] == "guard" and record["guard"]["retired"]
    assert remtta_here("adapt", folder, *options, "--output", tmp_path / "off", "--guard", "off") == 0
    assert json.loads((tmp_path / "off" / "run.json").read_text())["guard"] is None


def test_eval_sets_a_guarded_method_like_its_own(checkpoint: Path, tmp_path: Path) -> None:
    for number in range(2 * NUM_CLASSES):
        path = tmp_path / "tree" / "fog" / f"c{number % NUM_CLASSES}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_image(number).save(path)
    options = [*TINY_OPTIONS, "--checkpoint", str(checkpoint), "--set", "rem.lr=0.02", "--no-plots", "-q"]
    run = tmp_path / "run"
    assert remtta_here("eval", tmp_path / "tree", *options, "--methods", "rem,rem+guard", "-o", run) == 0
    methods = json.loads((run / "results.json").read_text())["methods"]
    assert [methods[name]["config"]["lr"] for name in ("rem", "rem+guard")] == [0.02, 0.02]


def test_one_table_takes_a_method_with_several_settings(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for number in range(NUM_CLASSES):
        path = tmp_path / "tree" / "fog" / f"class_{number}" / "0.png"
        path.parent.mkdir(parents=True)
        draw_image(number).save(path)
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "-b", "2", "--no-plots"]
    options += [f"--set={value}" for value in ("random.masking=random", "high.lr=0.05", "rem.lr=0.02")]
    options += ["--methods", "rem,random=rem,high=rem+guard"]
    assert remtta_here("eval", tmp_path / "tree", *options, "-o", run) == 0
    methods = json.loads((run / "results.json").read_text())["methods"]
    assert list(methods) == ["rem", "random=rem", "high=rem+guard"]
    configs = [method["config"] for method in methods.values()]
    assert [config["masking"] for config in configs] == ["attention", "random", "attention"]
    assert [config["lr"] for config in configs] == [0.02, 0.02, 0.05]
    assert (run / "deltas" / "random=rem_seed0.safetensors").is_file()
    for names, told in [("rem,rem", "rem is named twice"), ("a.b=rem", "cannot label"), ("tent=rem", "cannot label")]:
        assert remtta_here("eval", tmp_path / "tree", *options[:-1], names, "-o", tmp_path / "no") == 2
        assert told in capfd.readouterr().err
