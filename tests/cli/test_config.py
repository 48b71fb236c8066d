"""Reading options from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.command import refusal_of, remtta_here
from tests.conftest import TINY, TINY_OPTIONS
from tests.records import record_of
from tests.test_options_page import COMMANDS


def test_values_of_a_file_are_read_as_on_the_command_line_which_wins(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "batch_size: 20\nguard: off\nlr: 1e-3\nnull: true\nset: [a=1]\nmodel-kwargs: {depth: 6, img_size: 32}\n"
        "mean: 0.5\nmask-ratios: [0, 0.1]\nlabels: 2026-11-21\nlimit: null\n"
    )
    words = ["x", "--config", str(config), "--batch-size", "8", "--set", "b=2"]
    values = COMMANDS["adapt"].make_context("adapt", words).params
    assert (values["batch_size"], values["action"], values["lr"], values["null"]) == (8, "off", 0.001, True)
    assert (values["pairs"], values["mean"], values["mask_ratios"]) == (["b=2"], (0.5, 0.5, 0.5), "0,0.1")
    assert values["model_kwargs"] == ["depth=6", "img_size=32"] and str(values["labels"]) == "2026-11-21"
    assert values["limit"] is None


def test_a_run_takes_its_options_from_a_file(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"model": "vit_tiny_patch16_224", "num-classes": 7, "crop-pct": 1.0, "model-kwargs": TINY}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**options, "checkpoint": str(checkpoint), "batch-size": 4, "quiet": True}))
    assert remtta_here("adapt", frames, "--config", config, "-o", tmp_path / "a") == 0
    arguments = [*TINY_OPTIONS, "--checkpoint", str(checkpoint), "-b", "4", "-q"]
    assert remtta_here("adapt", frames, *arguments, "-o", tmp_path / "b") == 0
    assert capfd.readouterr() == ("", "")
    first, second = (tmp_path / name / "predictions.jsonl" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert record_of(tmp_path / "a")["model"] == record_of(tmp_path / "b")["model"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("batchsize: 3", 'run.yaml: remtta adapt has no option "batchsize"; did you mean batch-size?'),
        ("config: a.yaml", 'has no option "config"'),
        ("batch-size: 3\nbatch_size: 4", "run.yaml: batch-size is given twice"),
        ("lr: abc", "run.yaml: Invalid value for '--lr'"),
        ("resume: 3", "run.yaml: resume is true or false, got 3"),
        ("mean: [1, 2]", "run.yaml: mean takes 3 numbers, or one for all; got 1 2"),
        ("lr: {a: 1}", "run.yaml: lr takes a single value, a list of them, or pairs; got {'a': '1'}"),
        ("- lr", "run.yaml holds no options; write one per line"),
        ("3: 4", 'has no option "3"'),
        ("lr: [", "run.yaml cannot be read as YAML: while parsing a flow"),
        ("lr: !!python/object/apply:os.getcwd []", "run.yaml: Invalid value for '--lr'"),
        ("output: ''", "run.yaml: output is empty; give a value, or leave it out"),
        (None, "run.yaml: no such file"),
    ],
)
def test_what_is_wrong_in_a_file_is_reported_in_one_line(
    content: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("run.yaml").write_text(content)
    code, line = refusal_of(capfd, "adapt", "nowhere", "--config", "run.yaml")
    assert code == 2 and told in line
    assert not {path.name for path in tmp_path.iterdir()} - {"run.yaml"}


@pytest.mark.parametrize("command", [("adapt", "x", "--config"), ("inspect",)])
def test_a_device_without_an_end_is_not_read(command: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    code, line = refusal_of(capfd, *command, "/dev/zero")
    assert code in (2, 4) and "not a regular file" in line
