"""Updates that teach next to nothing are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import ImageEnhance
from safetensors.torch import save
from torch import Tensor

from remtta.errors import UsageError
from remtta.guard.guard import Guard
from remtta.guard.pace import NOTHING_NEW, Pace
from remtta.methods.method import build_method
from remtta.methods.settings import MethodConfig
from remtta.methods.tent import TentConfig
from remtta.options import GuardOptions, RunOptions
from tests.command import remtta_here
from tests.conftest import draw_image, random_images, tiny_vit
from tests.guard.asking import ask
from tests.guard.test_conditions import condition
from tests.records import lines_of, record_of, rows_of
from tests.runs.tiny import adapt_in_parts, adapt_tiny

CONFIG = TentConfig(lr=0.05)


class Walker:
    """A method whose weights go so far with each update, one way or to and fro."""

    def __init__(self, *, straight: bool) -> None:
        self.num_updates, self.place, self._straight = 1, 0.0, straight
        self.net = self.weights = self

    @property
    def committed(self) -> tuple[dict[str, Tensor], int]:
        return {"norm": torch.tensor([self.place])}, self.num_updates

    def learn(self) -> None:
        self.num_updates += 1
        self.place += 1 if self._straight or self.num_updates % 2 else -1


def new_pace(*, straight: bool = True) -> Pace:
    return Pace(cast(Any, Walker(straight=straight)))


def walk(pace: Pace, *numbers: int, each: int = 20, first: int = 0) -> str:
    """Which of so many batches of each condition it has the method learn from, as crosses."""
    told = ""
    for number in numbers:
        for batch in range(first, first + each):
            told += "x" if (wanted := pace.before(condition(number, batch)) is None) else "."
            if wanted:
                cast(Any, pace._method).learn()
    return told


def test_every_second_block_is_learned_from_while_that_gets_the_weights_anywhere() -> None:
    assert walk(new_pace(), 0, each=24) == 12 * "x."
    settled = walk(new_pace(straight=False), 0, each=80)
    assert settled == 8 * "x." + 62 * "." + "x" + "."  # one in 64 after a window of eight


def test_weights_that_never_settle_are_taken_to_be_settled_at_last() -> None:
    pace = new_pace()
    assert walk(pace, 0, each=1) == "x"
    pace._now.taught = 63
    assert walk(pace, 0, each=70) == ".x" + 63 * "." + "x...."


def test_a_change_is_learned_from_at_once() -> None:
    pace = new_pace(straight=False)
    assert walk(pace, 0, 1, 0) == 3 * (8 * "x." + 4 * ".")
    assert pace.events() == 2 * [{"event": "changed", "frames": 400}]
    assert pace.record() == {"frames": 1200, "adapted_on": 480, "changes": 2}


def test_a_slow_drift_is_noticed_in_the_end() -> None:
    pace = new_pace(straight=False)
    for batch in range(60):
        pace.before(0.3 * random_images(20, batch) + 0.01 * batch)
    assert 2 <= pace.record()["changes"] <= 6


def test_at_the_source_weights_all_is_new() -> None:
    pace = new_pace(straight=False)
    assert walk(pace, 0)[-4:] == "...."
    cast(Any, pace._method).num_updates = 0
    assert walk(pace, 0, each=3) == "x.x" and pace.events() == []


def test_small_batches_are_looked_at_together() -> None:
    pace = new_pace()
    walk(pace, 0, each=2)
    wanted = [pace.before(part) is None for part in torch.cat([condition(0, 7), condition(1)]).split(5)]
    assert wanted == [False] * 3 + [True] * 5


def test_a_state_can_be_saved_at_any_time() -> None:
    pace = new_pace()
    for _ in range(12):
        assert save(pace.state())
        walk(pace, 0, each=1)


def test_a_state_brings_everything_back() -> None:
    first = new_pace()
    walk(first, 0, 1, each=7)
    second = Pace(first._method)
    second.load_state(first.state())
    states = [pace.state() for pace in (first, second)]
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
    assert walk(first, 1, 0, each=3) == walk(second, 1, 0, each=3)


def test_what_is_only_predicted_takes_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    method = build_method("tent", tiny_vit(), CONFIG)
    assert method.trains
    images = random_images(4)
    method(images)
    guard = Guard(method, GuardOptions(answer="both"), sparing=True)
    adapted = method.delta()
    halves = {name: delta / 2 for name, delta in adapted.items()}
    monkeypatch.setattr(method, "predict_source", None)
    answers = ask(guard, images, learn=False)
    assert answers.weight == 0.5 and guard.num_looked == 0
    assert all(torch.equal(delta, method.delta()[name]) for name, delta in adapted.items())
    other = build_method("tent", tiny_vit(), CONFIG)
    other.load_delta(halves)
    torch.testing.assert_close(answers.logits, other.predict(images))


@pytest.fixture
def shift(tmp_path: Path) -> Path:
    """Day for 120 frames, and night for 60."""
    folder = tmp_path / "shift"
    folder.mkdir()
    for number in range(180):
        image = draw_image(number, 32, 32)
        (ImageEnhance.Brightness(image).enhance(0.2) if number >= 120 else image).save(folder / f"{number:03}.png")
    return folder


def test_a_run_goes_on_bit_for_bit_and_tells_what_it_adapted_on(
    shift: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("remtta.guard.conditions._BLOCK", 10)
    options: dict[str, Any] = {"batch_size": 10, "adapt": "auto"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = adapt_tiny(shift, whole, "tent", options=options)
    rows, record = rows_of(whole), record_of(whole)
    learned = [row["adapted"] for row in rows][::10]
    assert learned == 9 * [True, False]
    assert [row.get("not_adapted") == NOTHING_NEW for row in rows][::10] == [not each for each in learned]
    assert record["pace"] == {"frames": 180, "adapted_on": 90, "changes": 1}
    assert (record["counts"]["not_adapted"], record["counts"]["updates"]) == (90, 9)
    assert {"event": "changed", "frames": 120, "frame": 120}.items() <= lines_of(whole / "events.jsonl")[0].items()
    assert "adapted on 50 % of frames" in summary.report()
    adapt_in_parts((6, 4), shift, parts, "tent", options=options)
    assert (parts / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert record_of(parts)["pace"] == record["pace"]
    with pytest.raises(UsageError, match='adapt was "auto", is "always"'):
        adapt_tiny(shift, parts, "tent", options={**options, "adapt": "always"}, resume=True)
    assert remtta_here("inspect", whole) == 0
    assert "pace         adapted on 50 % of frames; 1 changes" in capsys.readouterr().out


def test_methods_without_updates_to_leave_out_are_refused(shift: Path, tmp_path: Path) -> None:
    for method, config in (("source", MethodConfig()), ("tent", TentConfig(episodic=True))):
        with pytest.raises(UsageError, match="--adapt auto skips updates"):
            adapt_tiny(shift, tmp_path / "run", method, config=config, options={"adapt": "auto"})
    with pytest.raises(UsageError, match="adapt must be always or auto"):
        RunOptions(adapt="never")  # type: ignore[arg-type]
