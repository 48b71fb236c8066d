"""The options of the commands: each declared once, with help, and what is not given as the library has it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import pytest
from typer.models import ArgumentInfo

from remtta.bench.subjects import BenchOptions
from remtta.cli import COMMANDS
from remtta.cli.groups import flat
from remtta.corruptions.choices import CorruptOptions
from remtta.methods.settings import REMConfig, method_config
from remtta.methods.settings.chosen import MethodOptions, MethodsOptions
from remtta.methods.source import SourceConfig
from remtta.options import DataOptions, EvalOptions, ModelOptions, RunOptions, StreamOptions
from remtta.options.option import Member
from tests.command import refusal_of, remtta_here

LIBRARY = (RunOptions, EvalOptions, DataOptions, StreamOptions, ModelOptions, CorruptOptions, BenchOptions)

OPTIONS: dict[str, dict[str, Member]] = {
    name: {member.flag: member for member in flat(command).members.values() if member.option}  # type: ignore[attr-defined]
    for name, command in COMMANDS.items()
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_short_and_takes_arguments_and_groups(name: str) -> None:
    assert len(inspect.getsource(COMMANDS[name]).splitlines()) <= 95
    for hint in inspect.get_annotations(COMMANDS[name], eval_str=True).values():
        kind, *metadata = get_args(hint) or (hint,)
        assert kind is None or is_dataclass(kind) or isinstance(metadata[0], ArgumentInfo)


def test_every_option_says_something_and_no_two_say_the_same() -> None:
    helps: dict[str, set[str]] = defaultdict(set)
    for options in OPTIONS.values():
        for flag, member in options.items():
            assert member.option and member.option.help
            helps[member.option.help].add(flag)
    assert all(len(flags) == 1 for flags in helps.values()), helps


@pytest.mark.parametrize("group", LIBRARY)
def test_the_librarys_defaults_are_good_and_need_no_words_of_their_own(group: Any) -> None:
    assert group() == group(**{each.name: getattr(group(), each.name) for each in fields(group) if each.init})


def test_methods_that_are_not_named_are_remtta_and_the_source() -> None:
    assert MethodOptions().config(50) == method_config("remtta", {}, batch_size=50)
    remtta = method_config("remtta", {}, batch_size=50)
    assert MethodsOptions().configs(50) == {"source": SourceConfig(), "remtta": remtta}
    assert MethodsOptions(("rem",)).configs(50) == {"rem": REMConfig()}


def test_adapt_shows_at_most_thirty_options_in_five_panels(capfd: pytest.CaptureFixture[str]) -> None:
    common = [member.option for member in OPTIONS["adapt"].values() if member.option and member.option.common]
    assert len(common) <= 28  # beside --help and --help-all
    assert {option.panel for option in common} == {
        *("Stream", "Model", "Method", "Answers and guard", "Output and running")
    }
    assert remtta_here("adapt", "--help") == 0
    told = capfd.readouterr().out
    assert "adapt [OPTIONS] SOURCE" in told and "--method" in told and "--flush-after" not in told
    assert "more options: " in told and "adapt --help-all" in told
    assert remtta_here("adapt", "--help-all") == 0
    told = capfd.readouterr().out
    assert all(flag in told for flag in OPTIONS["adapt"])
    assert remtta_here("corrupt", "--help") == 0
    told = capfd.readouterr().out
    assert all(flag in told for flag in OPTIONS["corrupt"])  # a command of fewer shows all


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["adapt", "x", "--threads", "1000000"], "Invalid value for '--threads': must be at most "),
        (["adapt", "x", "--steps", "9" * 21], "Invalid value for '--steps': must be at most 10000"),
        (["eval", ".", "--methods", "rem", "--set", "rem.steps=1000000"], "steps must be from 1 to 10000"),
        (["adapt", "x", "--topk", "3"], "No such option: --topk"),
        (["adapt", "x", "--preset", "paper"], "No such option: --preset"),
    ],
)
def test_numbers_are_bounded(args: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, line = refusal_of(capfd, *args)
    assert code == 2 and told in line


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["adapt", "x", "--output="], "--output"),
        (["adapt", "x", "-o", ""], "-o"),
        (["adapt", ""], "an argument"),
        (["eval", "x", "--methods", ""], "--methods"),
        (["corrupt", "", "y"], "an argument"),
    ],
)
def test_empty_values_are_refused(args: list[str], what: str, capfd: pytest.CaptureFixture[str]) -> None:
    told = f"Error: {what} is empty (is a variable of the shell not set?); give a value, or leave it out"
    assert refusal_of(capfd, *args) == (2, told)
