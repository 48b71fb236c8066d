"""The help of the commands."""

from __future__ import annotations

import dataclasses
import re

import pytest

from remtta.cli import COMMANDS
from remtta.methods.settings import METHOD_SUMMARIES, METHOD_TABLE
from tests.command import remtta_here


@pytest.mark.parametrize("command", COMMANDS)
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
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == list(METHOD_TABLE)
    assert remtta_here("methods", "rem") == 0
    told = capfd.readouterr().out
    assert "  mask_ratios = 0,0.1,0.2\n      Fractions of patch tokens to mask" in told
    assert "None for the first three quarters" in " ".join(told.split())
    assert remtta_here("methods", "tent") == 0
    assert "0.001 at a batch of 64" in capfd.readouterr().out
    assert remtta_here("methods", "tenth") == 2
    assert set(METHOD_SUMMARIES) == set(METHOD_TABLE)


def test_every_setting_of_a_method_is_explained_and_used(capfd: pytest.CaptureFixture[str]) -> None:
    for method, named in METHOD_TABLE.items():
        assert remtta_here("methods", method) == 0
        lines = capfd.readouterr().out.splitlines()[2:]
        own = [number for number, line in enumerate(lines) if re.match(r"  \w+ = ", line)]
        names = [lines[number].split()[0] for number in own]
        fields = dataclasses.fields(named.config)
        assert names == [field.name for field in fields if field.name not in named.config.unused]
        assert all(len(lines[number + 1].strip()) > 10 for number in own), method
        assert ("lr" in names) == (method not in ("source", "centre", "fast", "norm", "lame", "foa"))
