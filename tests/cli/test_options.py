from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from itertools import combinations
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from remtta.cli.options.answers import AnswerOptions
from remtta.cli.options.evaluation import MethodsOptions, ProtocolOptions, ResultOptions, eval_options
from remtta.cli.options.method import MethodOptions, SharedSettings, SourceDataOptions, StreamSettings
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.run import OutputOptions, ServiceOptions, run_options
from remtta.cli.options.running import RunningOptions
from remtta.cli.options.stream import StreamOptions
from remtta.methods.settings.presets import named_config
from typer.models import ArgumentInfo

from remtta.bench.measure import BenchOptions
from remtta.cli import COMMANDS
from remtta.cli.bench import RoundOptions, SubjectOptions, bench_options
from remtta.cli.corrupt import TreeOptions
from remtta.cli.groups import flat
from remtta.corruptions.options import CorruptOptions
from remtta.methods.settings import REMConfig
from remtta.methods.settings.frozen import SourceConfig
from remtta.methods.settings.names import PRESET
from remtta.options import EvalOptions, RunOptions
from tests.command import remtta_here

HOMONYMS = {
    "--batch-size": "frames of adapt, images of eval, images of bench's step",
    "-b": "the same",
    "--checkpoint": "bench goes without one",
    "--engine": "who makes the runs of eval, who makes the images of corrupt",
    "--episodic": "every batch of adapt, every domain of eval",
    "--format": "of the images of corrupt, of what export writes",
    "--jobs": "runs of eval at a time, images of corrupt",
    "-j": "the same",
    "--limit": "frames of adapt, images per domain of eval, images per class of corrupt",
    "--methods": "those of eval, subjects of bench",
    "--model": "bench asks for one with random weights",
    "-m": "the same",
    "--on-error": "skips frames in adapt, stops at images in eval",
    "--output": "folder of a run, an evaluation, a demo, an export; file of apply, delta and report",
    "-o": "the same",
    "--overwrite": "a run, an evaluation, a demo, a tree; files of apply, delta, export and report",
    "--reset-every": "frames of adapt, images of eval",
    "--resume": "a run, an evaluation",
    "--seed": "of random choices, of the demo's drive; several in eval",
    "--set": "of the one method of adapt, of one of eval's",
    "--severity": "of eval's domains, of corrupt's images",
}
"""Options that mean something of its own in several commands; all others are declared in one group."""


def hints_of(owner: Callable[..., Any]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Type and metadata of a command's parameters, or a group's fields."""
    hints = get_type_hints(owner, include_extras=True)
    hints.pop("return", None)
    return {
        name: (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        for name, hint in hints.items()
    }


def groups_of(owner: Callable[..., Any]) -> Iterator[type]:
    """The groups of a command, those they are made of, and those they build on."""
    for kind, _ in hints_of(owner).values():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from (base for base in kind.__mro__ if is_dataclass(base))
            yield from groups_of(kind)


GROUPS = sorted(
    {group for command in COMMANDS.values() for group in groups_of(command)}, key=lambda kind: kind.__name__
)


def declared(group: type) -> dict[str, str | None]:
    """Names on the command line, and help, of the options that a group itself declares."""

    def command(options: Any) -> None: ...

    command.__annotations__["options"] = group
    app = typer.Typer(add_completion=False)
    app.command()(flat(command))
    options = [each for each in typer.main.get_command(app).params if each.name in vars(group)["__annotations__"]]
    return {name: getattr(each, "help", None) for each in options for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_short_and_takes_arguments_and_groups(name: str) -> None:
    assert len(inspect.getsource(COMMANDS[name]).splitlines()) <= 60
    for kind, metadata in hints_of(COMMANDS[name]).values():
        assert is_dataclass(kind) or isinstance(metadata[0], ArgumentInfo)


def test_no_option_is_declared_twice() -> None:
    found: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for group in GROUPS:
        for name, text in declared(group).items():
            assert text, f"{group.__name__} says nothing about {name}"
            found[name].append((group.__name__, text))
    assert len(found) > 90
    assert {name for name, places in found.items() if len(places) > 1} == set(HOMONYMS)
    for name, places in found.items():
        for (first, told), (second, other) in combinations(places, 2):
            assert told != other, f"{first} and {second} both declare {name}"


def test_what_is_not_given_is_as_in_the_library() -> None:
    method = MethodOptions(shared=StreamSettings(), source=SourceDataOptions())
    methods = MethodsOptions(shared=SharedSettings(), source=SourceDataOptions())
    running, protocol, shared = RunningOptions(), ProtocolOptions(), methods.shared.given("auto")
    groups = (method, AnswerOptions(), OutputOptions(), StreamOptions(), ServiceOptions())
    assert run_options(*groups, seed=running.seed) == RunOptions(preset=PRESET)
    assert method.config(running.precision) == named_config("remtta", {}, batch_size=50)
    size, scenario = methods.batch_size(None), protocol.chosen_scenario()
    assert eval_options(scenario, size, protocol, methods, ResultOptions()) == EvalOptions()
    assert methods.configs(shared, batch_size=size) == {"source": SourceConfig(), "rem": REMConfig()}
    assert TreeOptions().options(seed=running.seed) == CorruptOptions()
    assert bench_options(SubjectOptions(), ModelOptions(), RoundOptions(), running) == BenchOptions()
    assert not any(ModelOptions().given().values())


def test_the_name_of_a_setting_in_a_message_is_its_option() -> None:
    """MethodsOptions.configs tells of settings by the names of their options."""
    for name in SharedSettings().__dataclass_fields__:
        option = "--lambda" if name == "ranking_weight" else f"--{name.replace('_', '-')}"
        assert option in declared(SharedSettings)


@pytest.mark.parametrize("args", [("apply", "delta", "-o", "out.safetensors"), ("bench",)])
def test_bad_pairs_are_told_on_one_line(args: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here(*args, "--model-kwargs", "depth") == 2
    assert capfd.readouterr().err == "Error: --model-kwargs takes key=value pairs, got 'depth'\n"
