"""The options of the commands: each declared once, with help, and what is not given as the library has it."""

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from remtta.errors import UsageError
from remtta.methods.table import METHOD_TABLE
from remtta.options import LiveOptions, StreamOptions
from remtta.options.option import OptionField
from tests.command import command_line, remtta_here
from tests.lab.evaluation.trees import write_tree

OPTIONS: dict[str, dict[str, OptionField]] = {
    name: {field.flag: field for field in command.callback.fields.values() if field.option}
    for name, command in command_line().commands.items()
}


def test_every_option_says_something_and_no_two_say_the_same() -> None:
    helps: dict[str, set[str]] = defaultdict(set)
    for options in OPTIONS.values():
        for flag, field in options.items():
            assert field.option and field.option.text
            helps[field.option.text].add(flag)
    assert all(len(flags) == 1 for flags in helps.values()), helps


def test_adapt_shows_at_most_thirty_options_in_five_panels(capfd: pytest.CaptureFixture[str]) -> None:
    common = [field.option for field in OPTIONS["adapt"].values() if field.option and field.option.common]
    assert len(common) <= 30  # beside --help and --help-all
    assert {option.panel for option in common} == {
        *("Stream", "Model", "Method", "Answers and guard", "Output and running")
    }
    assert remtta_here("adapt", "--help") == 0
    told = capfd.readouterr().out
    assert "adapt [OPTIONS] SOURCE" in told and "--method" in told and "--flush-after" not in told
    assert "--mean" in told and "--std" in told and "--crop-pct" in told  # messages about checkpoints recommend them
    assert "more options: " in told and "adapt --help-all" in told
    for command, option in (("adapt", "--help-all"), ("corrupt", "--help")):  # of few options, --help shows all
        assert remtta_here(command, option) == 0
        assert not OPTIONS[command].keys() - {*re.findall(r"--[\w-]+", capfd.readouterr().out)}


@pytest.mark.parametrize(
    "command", [["adapt"], ["eval", "--no-plots", "--methods", "source"]], ids=lambda args: args[0]
)
def test_blocks_are_compiled_and_threads_set_if_asked_for(
    command: list[str], tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, compiled, threads = write_tree(tmp_path / "c", ["fog"], classes=["0"], each=1), list[str](), list[int]()
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "environ", {"REMTTA_CACHE": "mine"})
    name, *more = command
    for number, options in enumerate(([], ["--compile", "--threads", "2"])):
        assert (compiled, threads) == ([], [])
        assert remtta_here(name, root, *more, *tiny, "-q", "-o", tmp_path / str(number), *options) == 0
    assert (compiled, threads) == (["Block", "Block"], [2])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == os.path.join("mine", "compiled")  # not in /tmp


def test_options_of_live_sources_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[LiveOptions | None, bool]] = []

    def opened(source: str, options: StreamOptions, *, wait_at_start: bool) -> None:
        seen.append((options.live, wait_at_start))
        raise UsageError(source)

    monkeypatch.setattr("remtta.streams.sources.open_with", opened)
    for options in ([], ["--buffer", "all", "--reconnect-for", "3"]):
        assert remtta_here("adapt", "rtsp://camera/1", *options) == 2
    assert seen == [(None, False), (LiveOptions(reconnect_for=3.0, buffer="all"), True)]


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_has_help_with_an_example(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here(*command.split(), "--help") == 0
    text = capfd.readouterr().out
    assert re.search(rf"remtta {command}( \S|\n)", text)
    assert "Example" in text


def test_version_names_everything_on_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("--version") == 0
    assert re.fullmatch(r"remtta \S+, torch \S+, timm \S+, \w+\n", capfd.readouterr().out)


def test_methods_are_listed_with_their_settings(capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("methods") == 0
    listed = dict(line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines())
    old = ["light", "centre"]
    assert list(listed) == [*(name for name in METHOD_TABLE if name not in old), *old]
    assert [name for name, text in listed.items() if text.startswith("deprecated: ")] == old
    assert remtta_here("methods", "rem") == 0
    told = capfd.readouterr().out
    assert "  mask_ratios = 0,0.1,0.2\n      Fractions of patch tokens to mask" in told
    assert "None for the first three quarters" in " ".join(told.split())
    assert remtta_here("methods", "tent") == 0
    assert "0.001 at a batch of 64" in capfd.readouterr().out
    assert remtta_here("methods", "tenth") == 2


def test_every_setting_of_a_method_is_explained_and_used(capfd: pytest.CaptureFixture[str]) -> None:
    for method, named in METHOD_TABLE.items():
        assert remtta_here("methods", method) == 0
        lines = capfd.readouterr().out.splitlines()[2:]
        own = [number for number, line in enumerate(lines) if re.match(r"  \w+ = ", line)]
        names = [lines[number].split()[0] for number in own]
        assert names == list(named.config.setting_names())
        assert all(len(lines[number + 1].strip()) > 10 for number in own), method
        assert ("lr" in names) == (method not in ("source", "center", "centre", "neo", "fast", "norm", "lame", "foa"))
