"""The one loop: what it tells its listener, what a stop leaves, and that evaluations run through it, too."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta import REM, REMConfig, adapt_stream, load_delta
from remtta.engines.interrupts import Interrupts, Stopped
from remtta.evaluation import evaluate, open_dataset
from remtta.evaluation.ledger import delta_path
from remtta.guard.guard import Guard
from remtta.guard.observed import ObservedMethod
from remtta.methods.method import Method, Updater
from remtta.methods.settings import MethodConfig
from remtta.methods.source import SourceConfig
from remtta.models.card import card_of
from remtta.options import EvalOptions, GuardOptions, RunOptions
from remtta.runs.batch import BatchResult, Counts
from remtta.runs.folder import EVENTS, PREDICTIONS, STATE
from remtta.runs.place import Place
from remtta.runs.session import Listener, Policy, Session
from remtta.runs.states import load_position
from remtta.streams.batches import Batch
from remtta.streams.frames import Frame
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Stream
from tests.conftest import draw_image, tiny_vit
from tests.records import lines_of, record_of, rows_of

QUICK = GuardOptions("rollback", window=16, renewed=1, memory=1, least=4, doubt=1e-6, alarm=2e-6, retries=2)
METHODS: dict[str, tuple[MethodConfig, GuardOptions | None]] = {
    "rem": (REMConfig(lr=0.01), None),
    "rem+guard": (REMConfig(lr=0.05), QUICK),
    "source": (SourceConfig(), None),
}


class Diary(Listener):
    """Listens, and remembers."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.results: list[BatchResult] = []

    def answered(self, result: BatchResult) -> None:
        self.told.append("answered")

    def finished(self, result: BatchResult) -> None:
        self.told.append("finished")
        self.results.append(result)

    def deliver(self, result: BatchResult) -> None:
        self.told.append("pass on")


def decoded(first: int, count: int, broken: tuple[int, ...] = ()) -> list[DecodedFrame]:
    generator = torch.Generator().manual_seed(first)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return [
        DecodedFrame(index, f"{index}.png", None, None, None if index in broken else image, "no image")
        if index in broken
        else DecodedFrame(index, f"{index}.png", None, None, image)
        for index, image in enumerate(images, first)
    ]


def session_on(method: Method, diary: Diary, **more: Any) -> Session:
    card = card_of(method.net.model)
    plain = {"policy": Policy(), "listener": diary, "interrupts": Interrupts()}
    return Session(ObservedMethod(method), card, Counts(), **{**plain, **more})


@pytest.mark.parametrize("early", [False, True])
def test_a_listener_hears_of_each_batch_in_order(early: bool) -> None:
    diary, method = Diary(), REM(tiny_vit(), REMConfig(lr=0.01))
    session = session_on(method, diary, answer_early=early)
    session.run([Batch(decoded(0, 4, broken=(1,))), Batch(decoded(4, 2), learn=False), Batch(decoded(6, 1, (6,)))])
    assert diary.told == ["answered", *(["pass on", "finished"] if early else ["finished", "pass on"])] * 3
    first, second, third = diary.results
    assert [len(result.answers.logits) for result in (first, second, third)] == [3, 2, 0]
    assert [(result.update, result.adapted, result.num_learned) for result in diary.results] == [
        (0, True, 3),
        (1, False, 0),
        (1, False, 0),
    ]
    assert session.counts == Counts(frames=7, skipped=2, updates=1, frames_in_delta=3, frames_since_reset=3)


def write_domain(root: Path, count: int = 24) -> list[Path]:
    """A tree of one domain; returns its images in the order in which it is visited."""
    files = []
    for number in range(count):
        folder = root / "night" / "abcdefg"[number % 7]
        folder.mkdir(parents=True, exist_ok=True)
        draw_image(number).save(folder / f"{number:02d}.png")
        files.append(folder / f"{number:02d}.png")
    return sorted(files)


@pytest.mark.parametrize("name", METHODS)
def test_an_evaluation_of_one_domain_is_the_run_over_its_images(name: str, tmp_path: Path) -> None:
    config, guard = METHODS[name]
    files = write_domain(tmp_path / "tree")
    run, table = tmp_path / "run", tmp_path / "table"
    plain = name.removesuffix("+guard")
    options = RunOptions(batch_size=5, logits=True, guard=guard)
    adapt_stream(tiny_vit(), [str(file) for file in files], run, method=plain, config=config, options=options)
    dataset = open_dataset(tmp_path / "tree", num_classes=7, labels=None)
    shown = EvalOptions(batch_size=5, order="stored", guard=guard or GuardOptions())
    evaluate(tiny_vit(), dataset, table, methods={name: config}, options=shown)
    for mine, other in zip(rows_of(run), rows_of(table), strict=True):
        same = ("index", "source", "class", "update", "adapted", "answered_by")
        assert [mine.get(key) for key in same] == [other.get(key) for key in same]
        assert mine["prob"] == round(other["prob"], 6) and mine["entropy"] == round(other["entropy"], 6)
    if name == "source":
        return
    first, second = load_delta(run), load_delta(delta_path(table, name, 0))
    assert (first.frames, first.updates) == (second.frames, second.updates)
    assert all(torch.equal(first.tensors[key], second.tensors[key]) for key in second.tensors)
    if guard:
        decisions, again = lines_of(run / EVENTS), lines_of(table / EVENTS)
        assert decisions and [(e["frame"] // 5, e["event"]) for e in decisions] == [
            (e["index"] // 5, e["event"]) for e in again
        ]


# --- Stops in the middle of slow batches ----------------------------------------------------------------------------


def source_of(kind: str, frames: Path) -> Any:
    """A folder, a list of paths, or what looks like a camera that begins anew with the next frames."""
    if kind == "folder":
        return frames
    paths = [frames / f"frame_{number}.png" for number in range(12)]
    if kind == "list":
        return paths
    return Stream("cam", "camera", (Frame(path.name, partial(draw_image, 3)) for path in paths))


def stopped_in(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Send a signal in the middle of a batch, as if each took long."""
    step, calls = Updater.__call__, 0

    def slow(self: Updater[Any], images: Tensor, labels: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == batch:
            self.net.weights.parameters["blocks.0.norm1.weight"].data.add_(1.0)  # a step is half done
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, images, labels)

    patch.setattr(Updater, "__call__", slow)
    patch.setattr("remtta.runs.session.PATIENCE_S", 0.0)


@pytest.mark.parametrize(("kind", "guarded"), [("folder", False), ("list", True), ("camera", True)])
def test_a_stop_in_a_slow_batch_keeps_what_was_learned_before_it(
    kind: str, guarded: bool, frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    guard = GuardOptions(action="warn", window=16, renewed=1, memory=1, least=4) if guarded else None

    def go(folder: Path, **more: Any) -> Any:
        options = RunOptions(batch_size=3, guard=guard, save_every=100, **more)
        with Interrupts() as interrupts:
            source = source_of(kind, frames)
            return adapt_stream(
                tiny_vit(), source, folder, config=REMConfig(lr=0.01), options=options, interrupts=interrupts
            )

    go(whole)
    with monkeypatch.context() as patch:
        stopped_in(3, patch)
        summary = go(run)
    assert summary.signum == signal.SIGTERM and summary.num_frames == 6 and summary.num_updates == 2
    place, state = load_position(run / STATE, Place)
    assert (place.frames, place.updates) == (6, 2) and state
    delta = load_delta(run)
    assert (delta.updates, delta.frames) == (2, 6)
    with monkeypatch.context() as patch:
        stopped_in(1, patch)  # and again, in the first batch of the second part
        assert go(run, resume=True).num_updates == 2
    assert record_of(run)["counts"]["frames"] == len(rows_of(run)) == 6
    go(run, resume=True)
    rows = rows_of(run)
    if kind == "camera":  # its frames began anew, and the updates went on
        assert len(rows) == 18 and [row["update"] for row in rows[6::3]] == [2, 3, 4, 5]
    else:
        assert (run / PREDICTIONS).read_bytes() == (whole / PREDICTIONS).read_bytes()
        again, wanted = load_delta(run), load_delta(whole)
        assert all(torch.equal(again.tensors[key], wanted.tensors[key]) for key in wanted.tensors)


def test_a_stop_in_a_slow_batch_of_an_evaluation_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    write_domain(tmp_path / "tree")
    dataset = open_dataset(tmp_path / "tree", num_classes=7, labels=None)

    def go(folder: Path, **more: Any) -> dict[str, Any]:
        options = EvalOptions(batch_size=5, **more)
        with Interrupts() as interrupts:
            return evaluate(
                tiny_vit(), dataset, folder, methods={"rem": REMConfig()}, options=options, interrupts=interrupts
            )

    go(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stopped_in(3, patch)
        go(tmp_path / "parts")
    assert len(rows_of(tmp_path / "parts")) == 10
    go(tmp_path / "parts", resume=True)
    assert (tmp_path / "parts" / PREDICTIONS).read_bytes() == (tmp_path / "whole" / PREDICTIONS).read_bytes()


def test_the_guards_answers_reach_both_parts_of_a_batch() -> None:
    method = REM(tiny_vit(), REMConfig(lr=0.05))
    adapter = ObservedMethod(method, [Guard(method, QUICK)])
    pixels = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    fit = torch.tensor([True, True, False, True, False, True])
    for _ in range(6):
        answers = adapter.predict(pixels, fit)
        if answers.weight == 0:
            break
    assert answers.weight == 0 and torch.allclose(answers.logits, method.predict_source(pixels), atol=1e-5)
