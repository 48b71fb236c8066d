"""The guard: what it sees, when it acts, and that it leaves good adaptation alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from remtta.guard.evidence import Evidence, information_gap
from remtta.guard.guard import Guard
from remtta.guard.judge import describe
from remtta.methods.method import Method, build_method
from torch import Tensor

from remtta import adapt_stream
from remtta.errors import UsageError
from remtta.evaluation import evaluate
from remtta.methods.settings import REMConfig, method_config
from remtta.methods.tent import TentConfig
from remtta.options import EvalOptions, GuardOptions, RunOptions
from tests.conftest import draw_folder, random_images, tiny_vit
from tests.evaluation.trees import open_tree, write_tree
from tests.guard.asking import ask
from tests.records import lines_of, record_of

QUICK: dict[str, Any] = {"window": 24, "least": 12, "renewed": 1, "doubt": 0.01, "alarm": 0.02}
QUICK |= {"most_drift": 1e9, "memory": 1}  # a memory so short never takes a camera for parked


def tent(lr: float) -> Method:
    method = build_method("tent", tiny_vit(), method_config("tent", {"lr": lr}, batch_size=8))
    assert method.trains
    return method


def run(guard: Guard, batches: int, size: int = 8, start: int = 100) -> list[Tensor]:
    return [ask(guard, random_images(size, start + number)).logits for number in range(batches)]


def test_harm_is_undone_and_the_source_answers() -> None:
    method = tent(lr=3.0)
    guard = Guard(method, GuardOptions(**QUICK, retries=2))
    source = tiny_vit()
    answers = run(guard, 60)
    events = guard.judge.events()
    assert [event["event"] for event in events].count("rollback") == 2
    assert events[-1]["event"] == guard.judge.verdict == "retired"
    assert guard.judge.now.retired and guard.judge.now.total_alarms == 3
    assert {event["lr_scale"] for event in events if event["event"] == "rollback"} == {0.5, 0.25}
    assert method.num_updates == 0
    with torch.no_grad():
        torch.testing.assert_close(answers[-1], source(random_images(8, 159)), rtol=0, atol=1e-5)
    assert all(not tensor.any() for tensor in method.delta().values())


def test_adaptation_that_does_no_harm_is_left_alone() -> None:
    guarded, plain = tent(lr=1e-4), tent(lr=1e-4)
    guard = Guard(guarded, GuardOptions(**QUICK))
    for number in range(10):
        images = random_images(8, number)
        torch.testing.assert_close(ask(guard, images).logits, plain(images), rtol=0, atol=0)
    assert not guard.judge.events() and not guard.judge.now.total_alarms
    torch.testing.assert_close(guarded.delta(), plain.delta(), rtol=0, atol=0)


def test_warn_reports_once_and_changes_nothing() -> None:
    guarded, plain = tent(lr=3.0), tent(lr=3.0)
    guard = Guard(guarded, GuardOptions(**QUICK, action="warn"))
    for number in range(8):
        images = random_images(8, 100 + number)
        answers = ask(guard, images)
        torch.testing.assert_close(answers.logits, plain(images), rtol=0, atol=0)
        assert answers.weight == 1
    warnings = [event for event in guard.judge.events() if event["event"] == "warning"]
    assert len(warnings) == 1 and "nothing is undone" in describe(warnings[0])


def test_warn_reports_gradual_harm() -> None:
    """A doubt always comes before: it must not be taken for a warning."""
    guard = Guard(tent(lr=0.3), GuardOptions(**QUICK, action="warn"))
    run(guard, 40)
    events = [event["event"] for event in guard.judge.events()]
    assert events[0] == "doubt" and "warning" in events
    assert guard.judge.now.total_alarms == events.count("warning") <= events.count("doubt")
    assert "source answers" not in describe({"event": "doubt", "action": "warn"})


def test_a_class_that_no_image_ever_gets_hides_no_harm() -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(64, 10, generator=generator) * 2
    source[:, 9] = -1e4
    drawn = source.clone()
    drawn[:, 3] += 4
    gap, information = information_gap(drawn, source)
    assert gap < -0.3 * information
    assert math.isnan(information_gap(drawn.fill_(math.nan), source)[0])


def test_predictions_on_past_frames_that_are_not_finite_are_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(tent(lr=1e-4), GuardOptions(**QUICK))
    monkeypatch.setattr("remtta.guard.judge.evidence_of", lambda window: Evidence(math.nan, math.nan, 1.0))
    run(guard, 2)
    assert ask(guard, random_images(8)).weight == 0 and "not finite" in guard.judge.events()[0]["reason"]


def test_the_influence_of_batch_statistics_is_not_harm() -> None:
    """ROID corrects for the classes of the batch; the source's predictions, by which it is judged, have no such."""
    method = build_method("roid", tiny_vit(), method_config("roid", {"lr": 1e-12}, batch_size=8))
    assert method.trains
    guard = Guard(method, GuardOptions(**{**QUICK, "window": 32}))
    for number in range(12):
        ask(guard, random_images(1, number % 2).repeat(8, 1, 1, 1) if number % 3 else random_images(8, number))
    torch.testing.assert_close(guard.judge.window.adapted, guard.judge.window.source, rtol=0, atol=1e-2)
    assert not guard.judge.events()


def test_outputs_that_are_not_finite_are_never_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    method = build_method("tent", tiny_vit(), TentConfig(lr=1e38))
    assert method.trains
    monkeypatch.setattr(method.net.weights, "drift", lambda: 0.0)  # which would notice before any output
    guard = Guard(method, GuardOptions(window=200, least=200))
    assert all(torch.isfinite(logits).all() for logits in run(guard, 4))
    assert "not finite" in guard.judge.events()[0]["reason"]


def test_alarms_are_forgiven_and_the_learning_rate_comes_back() -> None:
    method = tent(lr=3.0)
    guard = Guard(method, GuardOptions(**QUICK, retries=50, lr_factor=1e-4, forgive_after=40))
    for number in range(20):
        if not guard.judge.now.total_alarms:
            run(guard, 1, start=100 + number)
    assert method._descent.optimizer._torch.param_groups[0]["lr"] == pytest.approx(3e-4)
    run(guard, 5, start=200)
    pardon = [event for event in guard.judge.events() if event["event"] == "pardon"]
    assert pardon and pardon[0]["alarms"] == 0
    assert method._descent.optimizer._torch.param_groups[0]["lr"] == pytest.approx(3.0)


def test_it_continues_from_its_state_as_if_it_had_not_stopped() -> None:
    def fresh() -> Guard:
        return Guard(tent(lr=0.3), GuardOptions(**QUICK, retries=50))

    whole = fresh()
    expected = run(whole, 12)
    events = whole.judge.events()
    assert whole.judge.now.total_alarms
    for stop in (1, 5):
        first = fresh()
        answers = run(first, stop)
        second = fresh()
        second.load_state(first.state())
        second.method.load_state(first.method.state())
        answers += run(second, 12 - stop, start=100 + stop)
        for got, wanted in zip(answers, expected, strict=True):
            assert torch.equal(got, wanted)
        assert first.judge.events() + second.judge.events() == events


def test_options_out_of_range_are_refused() -> None:
    for value in ({"action": "none"}, {"answer": "none"}, {"memory": 0}, {"least": 1}, {"most_drift": math.inf}):
        with pytest.raises(UsageError, match=r"guard|answer|action"):
            GuardOptions(**value)
    wrong: Any = "off"
    with pytest.raises(UsageError, match="guard must be GuardOptions or None, got off"):
        RunOptions(guard=wrong)


HASTY: dict[str, Any] = {**QUICK, "most_drift": 0.1}


def test_a_run_records_what_the_guard_did(tmp_path: Path) -> None:
    output, long_stream = tmp_path / "run", draw_folder(tmp_path / "long", range(72))
    options = RunOptions(batch_size=8, save_every=3, guard=GuardOptions("rollback", "adapted", **HASTY, retries=1))
    adapt_stream(tiny_vit(), long_stream, output, config=REMConfig(lr=0.05), options=options)
    record = record_of(output)
    rows, events = lines_of(output / "predictions.jsonl"), lines_of(output / "events.jsonl")
    by_source = [row for row in rows if row.get("answered_by") == "source"]
    assert record["exit_reason"] == "completed" and len(rows) == 72
    told = {"alarms": 2, "retired": True, "lead": 0, "answered_by_source": len(by_source), "answered_by_both": 0}
    assert record["guard"] == told
    assert [event["event"] for event in events if event["event"] in ("rollback", "retired")] == ["rollback", "retired"]
    assert all({"time", "frame", "alarms", "lr_scale"} <= event.keys() for event in events)
    assert all(row["update"] == 0 for row in by_source)
    assert not any(row["adapted"] for row in rows if row["index"] > events[-1]["frame"])
    plain = tmp_path / "source"
    adapt_stream(tiny_vit(), long_stream, plain, method="source", options=RunOptions(batch_size=8))
    for row, wanted in zip(rows, lines_of(plain / "predictions.jsonl"), strict=True):
        if "answered_by" in row:
            assert row["class"] == wanted["class"]
    assert 0 < len(by_source) < 72 - 8


def test_an_evaluation_reports_a_method_with_and_without_the_guard(tmp_path: Path) -> None:
    tree = open_tree(write_tree(tmp_path / "tree", ["fog", "snow"], severities=(), each=4))
    methods = dict.fromkeys(("rem", "rem+guard", "rem+both"), REMConfig(lr=0.05))
    options = EvalOptions(batch_size=8, guard=GuardOptions(**HASTY, retries=1))
    both = evaluate(tiny_vit(), tree, tmp_path / "both", methods=methods, options=options)["methods"]
    rows = lines_of(tmp_path / "both" / "predictions.jsonl")
    by_source = [row for row in rows if row.get("answered_by") == "source"]
    assert {row["method"] for row in by_source} == {"rem+guard"}
    assert {row["weight"] for row in rows if row["method"] == "rem+both"} == {0.5}
    assert both["rem+both"]["guard"]["answered_by_both"] == 56 and both["rem+both"]["forwards_per_image"] == 4
    told = {"alarms": 2, "retired": True, "lead": 0, "answered_by_source": len(by_source), "answered_by_both": 0}
    assert both["rem+guard"]["guard"] == told
    assert "guard" not in both["rem"] and both["rem"]["forwards_per_image"] == 3
    learned = both["rem+guard"]["seeds"]["0"]["adapted_images"]
    assert both["rem+guard"]["forwards_per_image"] > 1 + 2 * learned / 56  # and the source's predictions
    alone = evaluate(tiny_vit(), tree, tmp_path / "alone", methods={"rem": REMConfig(lr=0.05)}, options=options)
    assert alone["methods"]["rem"]["error"] == both["rem"]["error"]
