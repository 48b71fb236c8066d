"""The guard: when it acts, and that it leaves good adaptation alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta import adapt_stream
from remtta.errors import UsageError
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.methods.build import build_method
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import method_config
from remtta.options import Answer, GuardOptions, RunOptions
from remtta.options.run_options import Action
from remtta.pipeline.events import describe
from remtta.pipeline.guard import Guard
from remtta.pipeline.information import InformationGap, information_gap
from remtta.pipeline.pipeline import Pipeline
from remtta.runs.summary import RunSummary
from tests.conftest import draw_folder, random_images, same_tensors, tiny_vit
from tests.lab.evaluation.trees import open_tree, write_tree
from tests.pipeline.helpers import predict_and_learn
from tests.records import lines_of, record_of

QUICK: dict[str, Any] = {"window": 24, "min_frames": 12, "check_every": 1, "doubt": 0.01, "alarm": 0.02}
QUICK |= {"most_drift": 1e9, "memory": 1}  # a memory so short never takes a camera for parked


def tent(lr: float) -> Pipeline:
    """Return Tent without a guard."""
    return Pipeline(build_method("tent", tiny_vit(), method_config("tent", {"lr": lr}, batch_size=8)))


def guarded_tent(lr: float, **options: Any) -> tuple[Pipeline, Guard]:
    guard = Guard(GuardOptions(**{**QUICK, **options}))
    return Pipeline(tent(lr).method, guard), guard


def run(pipeline: Pipeline, batches: int, start: int = 100) -> list[Tensor]:
    """Return the predictions for batches of 8 images, from each of which the pipeline learns."""
    return [pipeline(random_images(8, start + number)) for number in range(batches)]


@pytest.mark.parametrize("answer", ["adapted", "both"])
def test_the_source_model_predicts_a_harmful_batch_and_its_weights_are_restored(answer: Answer) -> None:
    pipeline, _ = guarded_tent(lr=3.0, answer=answer)
    source = tiny_vit()
    for number in range(8):
        images, updates = random_images(8, 100 + number), pipeline.method.num_updates
        prediction = predict_and_learn(pipeline, images)
        if prediction.harmful:
            break
        assert pipeline.method.num_updates == updates + 1
    assert prediction.harmful and prediction.weight == 0 and updates > 0
    with torch.no_grad():
        torch.testing.assert_close(prediction.logits, source(images), rtol=0, atol=1e-5)
    assert pipeline.method.num_updates == 0
    assert same_tensors(pipeline.method.model.model.state_dict(), source.state_dict())
    assert [event["event"] for event in pipeline.events()][-1] == "rollback" and pipeline.total_alarms == 1
    pipeline(images)  # as a new pipeline learns from its first batch, at half the learning rate
    fresh = tent(lr=1.5)
    fresh(images)
    assert same_tensors(pipeline.delta(), fresh.delta())


def test_harm_is_undone_until_adaptation_ends() -> None:
    pipeline, guard = guarded_tent(lr=3.0, retries=2)
    predictions = run(pipeline, 60)
    events = pipeline.events()
    assert [event["event"] for event in events].count("rollback") == 2
    assert events[-1]["event"] == guard.state == "retired"
    assert pipeline.disabled and pipeline.total_alarms == 3
    assert {event["lr_scale"] for event in events if event["event"] == "rollback"} == {0.5, 0.25}
    with torch.no_grad():
        torch.testing.assert_close(predictions[-1], tiny_vit()(random_images(8, 159)), rtol=0, atol=1e-5)
    assert pipeline.method.num_updates == 0 and all(not tensor.any() for tensor in pipeline.delta().values())


def test_adaptation_that_does_no_harm_is_left_alone() -> None:
    (pipeline, _), plain = guarded_tent(lr=1e-4), tent(lr=1e-4)
    torch.testing.assert_close(run(pipeline, 10), run(plain, 10), rtol=0, atol=0)
    assert not pipeline.events() and not pipeline.total_alarms
    assert same_tensors(pipeline.delta(), plain.delta())


def test_warn_reports_once_and_changes_nothing() -> None:
    (pipeline, _), plain = guarded_tent(lr=3.0, action="warn"), tent(lr=3.0)
    for number in range(8):
        images = random_images(8, 100 + number)
        prediction = predict_and_learn(pipeline, images)
        torch.testing.assert_close(prediction.logits, plain(images), rtol=0, atol=0)
        assert prediction.weight == 1 and not prediction.harmful
    warnings = [event for event in pipeline.events() if event["event"] == "warning"]
    assert len(warnings) == 1 and "nothing is undone" in describe(warnings[0])
    assert same_tensors(pipeline.delta(), plain.delta())


def test_warn_reports_gradual_harm() -> None:
    """A doubt always comes before: it must not be taken for a warning."""
    pipeline, _ = guarded_tent(lr=0.3, action="warn")
    run(pipeline, 40)
    events = pipeline.events()
    kinds = [event["event"] for event in events]
    assert kinds[0] == "doubt" and "warning" in kinds
    assert pipeline.total_alarms == kinds.count("warning") <= kinds.count("doubt")
    undone = {**events[0], "action": "rollback"}
    assert describe(events[0]).startswith("adaptation is in doubt (")  # the adapted model goes on predicting
    assert describe(undone).startswith("the source model predicts while adaptation is in doubt (")


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
    monkeypatch.setattr(
        "remtta.pipeline.guard.information_gap_of", lambda window: InformationGap(math.nan, math.nan, 1.0)
    )
    pipeline, _ = guarded_tent(lr=1e-4)
    run(pipeline, 2)
    assert predict_and_learn(pipeline, random_images(8)).weight == 0
    assert "not finite" in pipeline.events()[0]["reason"]


def test_the_influence_of_batch_statistics_is_not_harm() -> None:
    """ROID corrects for the classes of the batch; the predictions that the guard compares have no such correction."""
    method = build_method("roid", tiny_vit(), method_config("roid", {"lr": 1e-12}, batch_size=8))
    guard = Guard(GuardOptions(**{**QUICK, "window": 32}))
    pipeline = Pipeline(method, guard)
    for number in range(12):
        pipeline(random_images(1, number % 2).repeat(8, 1, 1, 1) if number % 3 else random_images(8, number))
    assert method.num_updates == 12 and not pipeline.events()
    torch.testing.assert_close(guard.window.adapted, guard.window.source, rtol=0, atol=1e-2)


def test_outputs_that_are_not_finite_are_never_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, _ = guarded_tent(lr=1e38, window=200, min_frames=200)
    monkeypatch.setattr(pipeline.method.model.weights, "drift", lambda: 0.0)  # which would notice before any output
    assert all(torch.isfinite(logits).all() for logits in run(pipeline, 4))
    assert "not finite" in pipeline.events()[0]["reason"]


def test_alarms_are_forgiven_and_the_learning_rate_comes_back() -> None:
    pipeline, _ = guarded_tent(lr=3.0, retries=50, lr_factor=1e-4, forgive_after=40)

    def largest_change(seed: int) -> float:
        before = pipeline.delta()
        pipeline(random_images(8, seed))
        return max(float((tensor - before[name]).abs().max()) for name, tensor in pipeline.delta().items())

    for number in range(20):
        if not pipeline.total_alarms:
            largest_change(100 + number)
    small = [largest_change(200 + number) for number in range(5)]
    assert 0 < max(small) < 1e-2
    (pardon,) = [event for event in pipeline.events() if event["event"] == "pardon"]
    assert pardon["alarms"] == 0 and pardon["lr_scale"] == 1
    assert largest_change(205) > 1000 * max(small)


def test_it_continues_from_its_state_as_if_it_had_not_stopped() -> None:
    def fresh() -> Pipeline:
        return guarded_tent(lr=0.3, retries=50)[0]

    whole = fresh()
    expected, events = run(whole, 12), whole.events()
    assert whole.total_alarms
    for stop in (1, 5):
        first, second = fresh(), fresh()
        predictions = run(first, stop)
        second.load_state_dict(first.state_dict())
        predictions += run(second, 12 - stop, start=100 + stop)
        assert all(torch.equal(logits, other) for logits, other in zip(predictions, expected, strict=True))
        assert first.events() + second.events() == events


def test_options_out_of_range_are_refused() -> None:
    for value in (
        {"action": "none"},
        {"answer": "none"},
        {"class_history": 0},
        {"min_frames": 1},
        {"most_drift": math.inf},
    ):
        with pytest.raises(UsageError, match=r"guard|answer|action"):
            GuardOptions(**value)
    with pytest.raises(UsageError, match="guard must be GuardOptions or None, got off"):
        RunOptions(guard="off")  # type: ignore[arg-type]


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


@pytest.mark.parametrize("action", ["rollback", "off"])
def test_a_run_that_ends_in_doubt_says_so_with_its_lead(action: Action, tmp_path: Path) -> None:
    guard = GuardOptions(action, "both", **{**QUICK, "alarm": 1e6})
    given: dict[str, Any] = {"options": RunOptions(batch_size=8, guard=guard), "config": REMConfig(lr=0.05)}
    summary = adapt_stream(tiny_vit(), draw_folder(tmp_path / "frames", range(40)), tmp_path / "run", **given)
    lead, told = record_of(tmp_path / "run")["guard"]["lead"], "in doubt at the end, with a lead of"
    assert lead < -0.01
    if action == "off":
        assert told not in summary.report() and summary.figures()["doubted_lead"] is None
    else:
        assert f"guard: {told} {100 * lead:+.0f} %: label a sample" in summary.report()
        assert summary.figures()["doubted_lead"] == lead


def test_a_run_whose_doubt_has_ended_is_silent(tmp_path: Path) -> None:
    summary, (pipeline, guard) = RunSummary(tmp_path), guarded_tent(lr=1e-4)
    guard.status.doubting, guard.status.lead = True, -0.254
    summary.note_guard(pipeline)
    assert "a lead of -25 %" in summary.report()
    guard.status.doubting = False
    summary.note_guard(pipeline)
    assert "lead" not in summary.report()


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


def test_an_update_that_moves_the_weights_too_far_is_undone_at_once() -> None:
    guard = Guard(GuardOptions("rollback", "both", most_drift=0.01))
    pipeline = Pipeline(build_method("rem", tiny_vit(), REMConfig(lr=0.5)), guard)
    prediction = pipeline.predict(random_images(4))
    assert prediction.weight == 0.5 and not prediction.harmful  # it is from before the update
    pipeline.learn()
    assert not any(change.any() for change in pipeline.delta().values()) and pipeline.method.num_updates == 0
    assert [event["event"] for event in pipeline.events()] == ["rollback"] and guard.lr_scale == 0.5
