"""What a condition had taught comes back with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ImageEnhance
from torch import Tensor

from remtta.deltas.reading import read_arrays
from remtta.errors import UsageError
from remtta.evaluation.runner import evaluate
from remtta.guard.conditions import statistics
from remtta.guard.memory import Memory
from remtta.methods.registry import build_method
from remtta.methods.settings import MethodConfig, SourceConfig, TentConfig
from remtta.methods.settings.names import check_method_names, has_memory, method_of, preset_in
from remtta.options import EvalOptions, RunOptions
from tests.command import remtta_here
from tests.conftest import draw_image, random_images, tiny_vit
from tests.evaluation.trees import open_tree, write_tree
from tests.records import lines_of, record_of, rows_of
from tests.runs.tiny import adapt_in_parts, adapt_tiny

CONFIG = TentConfig(lr=0.05)


def condition(number: int, batch: int = 0) -> Tensor:
    """Twenty images of the same brightness and contrast, which no other condition has."""
    return 0.3 * random_images(20, 100 * number + batch) + 2 * number


def walk(memory: Memory, *numbers: int, each: int = 2) -> list[tuple[int, int]]:
    """Learn from so many batches of each condition; returns what the memory said was behind the weights."""
    said, behind = [], (0, 0)
    for number in numbers:
        for batch in range(each):
            images = condition(number, batch)
            behind = memory.look(images, behind)
            said.append(behind)
            memory._method(images)
            behind = behind[0] + 20, behind[1] + 20
    return said


def test_statistics_are_brightness_spread_and_roughness() -> None:
    flat = torch.full((1, 3, 16, 16), 0.5)
    stripes = flat.clone()
    stripes[..., ::2] = 0.7  # neighbours across differ by 0.2 at the finest scale, and not at all at the next
    none = torch.tensor(1e-3).log().item()
    assert statistics(flat)[0].tolist() == pytest.approx([0.5] * 3 + [none] * 11)
    expected = [0.6] * 3 + [torch.tensor(0.1).log().item()] * 3 + [none, torch.tensor(0.2).log().item()] + [none] * 6
    assert statistics(stripes)[0].tolist() == pytest.approx(expected, abs=2e-3)


def test_a_condition_that_returns_brings_its_weights_back() -> None:
    method = build_method("tent", tiny_vit(), CONFIG)
    memory = Memory(method, 3)
    walk(memory, 0, 1)
    left = method.delta()
    walk(memory, 2)
    assert memory.events() == []  # new ones go on from the weights of the moment
    assert method.num_updates == 6
    memory.look(condition(1, 5), (120, 120))
    back = method.delta()
    assert back.keys() == left.keys() and all(torch.equal(back[name], left[name]) for name in left)
    assert method.num_updates == 4
    assert memory.events() == [{"event": "recalled", "visits": 2, "away": 60}]
    assert walk(Memory(build_method("tent", tiny_vit(), CONFIG), 3), 0, 1, 0)[::2] == [(0, 0), (40, 40), (40, 40)]


def test_a_full_memory_forgets_what_was_away_for_longest() -> None:
    method = build_method("tent", tiny_vit(), CONFIG)
    memory = Memory(method, 3)
    walk(memory, 0, 1, 2, 1, 3)
    assert [each["away"] for each in memory.record()] == [0, 80, 40]  # 3, 2 and 1, without 0
    assert len(memory.events()) == 1
    walk(memory, 0)
    assert memory.events() == [] and len(memory.record()) == 3
    size = sum(tensor.nbytes for tensor in memory.state().values())
    walk(memory, 4, 5, 6, 7)
    assert sum(tensor.nbytes for tensor in memory.state().values()) <= size


def test_frames_of_one_condition_in_any_order_are_no_change() -> None:
    method = build_method("source", tiny_vit(), SourceConfig())
    memory = Memory(method, 3)
    generator = torch.Generator().manual_seed(0)
    for batch in range(30):
        brightness = torch.rand(20, 1, 1, 1, generator=generator)
        memory.look(random_images(20, batch) * (0.5 + brightness) + brightness, (0, 0))
    assert [each["visits"] for each in memory.record()] == [1]


def test_small_batches_are_looked_at_together() -> None:
    memory = Memory(build_method("tent", tiny_vit(), CONFIG), 3)
    for part in condition(0).split(7):
        memory.look(part, (0, 0))
    assert [each["frames"] for each in memory.record()] == [20]


def test_a_state_brings_everything_back() -> None:
    first = Memory(build_method("tent", tiny_vit(), CONFIG), 3)
    walk(first, 0, 1, 0)
    first.look(condition(0)[:7], (0, 0))
    second = Memory(build_method("tent", tiny_vit(), CONFIG), 3)
    second._method.load_state(first._method.state())
    second.load_state(first.state())
    first.events()
    for memory in (first, second):
        walk(memory, 1, 2, 0)
    assert first.events() == second.events() != []
    one, other = ({**memory.state(), **memory._method.state()} for memory in (first, second))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def nights(tmp_path: Path) -> Path:
    """Day, night, day and night, of 20 frames each."""
    folder = tmp_path / "nights"
    folder.mkdir()
    for number in range(80):
        image = draw_image(number, 32, 32)
        if number // 20 % 2:
            image = ImageEnhance.Brightness(image).enhance(0.2)
        image.save(folder / f"{number:03}.png")
    return folder


def test_a_run_goes_on_bit_for_bit_and_inspect_shows_its_conditions(
    nights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("remtta.guard.conditions._BLOCK", 10)
    options: dict[str, Any] = {"batch_size": 10, "memory": 4}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    adapt_tiny(nights, whole, "tent", options=options)
    record = record_of(whole)
    assert [each["visits"] for each in record["memory"]] == [2, 2]
    assert [each["away"] for each in record["memory"]] == [0, 20]
    assert [event["frame"] for event in lines_of(whole / "events.jsonl") if event["event"] == "recalled"] == [40, 60]
    assert [row["update"] for row in rows_of(whole)][::10] == [0, 1, 2, 3, 2, 3, 4, 5]
    fields, _ = read_arrays(whole / "delta.safetensors")
    assert (fields["frames"], fields["updates"]) == (60, 6)  # what the night's weights have seen
    adapt_in_parts((3, 5), nights, parts, "tent", options=options)
    assert (parts / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert record_of(parts)["memory"] == record["memory"]
    with pytest.raises(UsageError, match="memory was 4, is 0"):
        adapt_tiny(nights, parts, "tent", options={"batch_size": 10}, resume=True)
    assert remtta_here("inspect", whole) == 0
    told = capsys.readouterr().out
    assert "memory       2 conditions, which came back 2 times in all" in told and "40 frames in 2 visits" in told


def test_an_evaluation_has_memories_for_methods_that_are_named_so(tmp_path: Path) -> None:
    for path in (write_tree(tmp_path / "tree", ("fog", "contrast"), each=6) / "contrast").rglob("*.png"):
        ImageEnhance.Brightness(draw_image(int(path.stem), 32, 32)).enhance(0.1).save(path)
    options = EvalOptions(scenario="recurring", visits=2, batch_size=21)
    evaluate(
        tiny_vit(), open_tree(tmp_path / "tree"), tmp_path / "out", methods=["tent", "tent+memory"], options=options
    )
    events = lines_of(tmp_path / "out/events.jsonl")
    assert [(event["method"], event["event"], event["visit"]) for event in events] == [
        ("tent+memory", "recalled", 2),
        ("tent+memory", "recalled", 3),
    ]


def test_what_has_nothing_to_keep_is_refused(nights: Path, tmp_path: Path) -> None:
    for method, config in (("source", MethodConfig()), ("tent", TentConfig(episodic=True))):
        with pytest.raises(UsageError, match="leave it out, or choose another method"):
            adapt_tiny(nights, tmp_path / "run", method, config=config, options={"memory": 3})
    tree = open_tree(write_tree(tmp_path / "tree", ["fog"], each=1))
    for name in ("source+memory", "source+guard"):
        with pytest.raises(UsageError, match=re.escape(f"{name}: ")):
            evaluate(tiny_vit(), tree, tmp_path / "out", methods=["source", name])
        assert not (tmp_path / "out").exists()  # nor was the first method run
    with pytest.raises(UsageError, match="memory must be of 2 conditions or more"):
        RunOptions(memory=1)
    names = ["remtta+memory", "a=remtta+smooth+memory", "tent+guard+memory", "remtta"]
    check_method_names(names)
    assert [has_memory(name) for name in names] == [True, True, True, False]
    assert [preset_in(name) for name in names] == ["remtta", "remtta", None, "remtta"]
    assert [method_of(name) for name in names] == ["rem", "rem", "tent", "rem"]
