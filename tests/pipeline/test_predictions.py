"""Predictions by the adapted and the source model, how they are weighted, and when the weights change."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from remtta.methods.build import build_method
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import METHOD_TABLE, _warn_of_deprecated, method_config
from remtta.methods.tent import TentConfig
from remtta.options import Action, Answer, GuardOptions
from remtta.pipeline.events import describe
from remtta.pipeline.forward import shifted, source_logits
from remtta.pipeline.guard import Guard, guard_for
from remtta.pipeline.information import PredictionWindow, information_gap_of, mixture, parked_class
from remtta.pipeline.pipeline import Pipeline
from remtta.runs.summary import RunSummary
from tests.command import refusal_of, remtta_here
from tests.conftest import TINY_OPTIONS, random_images, same_tensors, tiny_vit
from tests.pipeline.helpers import predict_and_learn
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny


def logits_of(classes: list[int], certain: float = 4.0, num_classes: int = 5) -> Tensor:
    """Logits that name these classes."""
    return torch.eye(num_classes)[classes] * certain


def window_of(source: Tensor, adapted: Tensor, size: int = 1000, memory: int = 1000) -> PredictionWindow:
    window = PredictionWindow(size, memory)
    window.add(source, adapted)
    return window


def test_the_window_holds_the_last_frames_and_the_classes_of_more() -> None:
    window = PredictionWindow(3, 5)
    for start in range(0, 8, 2):
        logits = logits_of([(start + step) % 5 for step in range(2)])
        window.add(logits, logits + 1)
    assert window.source.argmax(1).tolist() == [0, 1, 2]
    assert window.votes.tolist() == [3, 4, 0, 1, 2]
    torch.testing.assert_close(window.adapted, window.source)  # a constant more is the same prediction
    torch.testing.assert_close(window.source.float().exp().sum(1), torch.ones(3), rtol=0, atol=2e-3)
    window.back_to_source()
    assert torch.equal(window.adapted, window.source) and len(window.source) == 3


def test_with_many_classes_mutual_information_decides() -> None:
    classes = [number % 5 for number in range(40)]
    source = logits_of(classes) + torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    collapsed = source.clone()
    collapsed[:, 3] += 3
    assert information_gap_of(window_of(source, source)).lead == pytest.approx(0, abs=1e-3)
    assert information_gap_of(window_of(source, 2 * source)).lead == pytest.approx(0, abs=0.01)
    assert information_gap_of(window_of(source, collapsed)).lead < -0.05
    better = information_gap_of(window_of(collapsed, source))
    assert better.lead > 0.05 and better.gap > 0
    assert better.lead == pytest.approx(better.gap / better.information)


def test_a_parked_camera_is_detected_by_the_sources_predictions() -> None:
    mixed = torch.arange(400) % 10
    assert parked_class(mixed, 10) is None
    mostly = torch.where(torch.arange(400) % 2 == 0, 7, mixed)
    assert parked_class(mostly, 10) == 7
    assert parked_class(mostly[:99], 10) is None  # too few to know
    assert parked_class(torch.zeros(400, dtype=torch.int32), 2) == 0
    assert parked_class(torch.arange(400) % 2, 2) is None  # of two classes, half of the frames is a fair share
    noise = torch.cat([torch.full((100,), 7), mixed[:150]]).repeat(4)  # a lost link, again and again
    assert float((noise == 7).float().mean()) > 0.4 and parked_class(noise, 10) is None


def test_on_one_class_the_model_that_predicts_it_more_leads() -> None:
    """The same predictions, of a camera that has seen nothing else, and of one that was pointed elsewhere before."""
    source = logits_of([3, 3, 1, 3, 2, 3, 3, 0] * 13)
    adapted = logits_of([3] * 104)
    assert information_gap_of(window_of(source, adapted)).lead > 0.2
    assert information_gap_of(window_of(adapted, source)).lead < -0.2
    elsewhere = PredictionWindow(104, 1000)
    elsewhere.add(logits_of([0, 1, 2, 4] * 200), logits_of([0, 1, 2, 4] * 200))
    elsewhere.add(source, adapted)
    assert information_gap_of(elsewhere).lead < -0.2


def test_a_mixture_is_that_of_the_probabilities() -> None:
    one, other = torch.randn(6, 4), torch.randn(6, 4)
    probs = mixture(one, other, 0.3).exp()
    torch.testing.assert_close(probs, 0.3 * one.softmax(1) + 0.7 * other.softmax(1))
    certain = mixture(torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]]), 0.25)
    torch.testing.assert_close(certain.exp(), torch.tensor([[0.25, 0.75]]))


def pipeline_of(name: str, answer: Answer, action: Action = "off", **settings: Any) -> Pipeline:
    method = build_method(name, tiny_vit(), dataclasses.replace(METHOD_TABLE[name].config(), **settings))
    guard = guard_for(method, GuardOptions(action=action, answer=answer, min_frames=4, check_every=1))
    assert guard is not None
    return Pipeline(method, guard)


@pytest.mark.parametrize("name", ["rem", "tent"])
@pytest.mark.parametrize("latency", [False, True])
def test_predict_changes_no_weights_and_learn_does(name: str, latency: bool) -> None:
    pipeline, images = pipeline_of(name, "both", lr=0.01), random_images(6)
    weights = pipeline.method.model.model.state_dict()
    source = {key: tensor.clone() for key, tensor in weights.items()}
    learnable = torch.tensor([True, True, False, True, True, False])
    for _ in range(2):  # the second one replaces the first
        pipeline.predict(images, learnable, latency=latency)
        assert same_tensors(weights, source) and pipeline.method.num_updates == 0
    pipeline.learn()
    changed = {key for key, tensor in weights.items() if not torch.equal(tensor, source[key])}
    assert changed == set(pipeline.method.trained) and pipeline.method.num_updates == 1
    learned = {key: tensor.clone() for key, tensor in weights.items()}
    pipeline.learn()  # nothing is left to learn from
    pipeline.predict(images, update=False)
    pipeline.learn()
    assert same_tensors(weights, learned) and pipeline.method.num_updates == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [("rem", {}), ("roid", {}), ("memo", {"num_augmentations": 2, "optimizer": "sgd"}), ("lame", {})],
)
def test_both_models_predict_for_any_method_and_change_no_update(name: str, settings: dict[str, Any]) -> None:
    pipeline, source = pipeline_of(name, "both", **settings), tiny_vit()
    plain = Pipeline(build_method(name, tiny_vit(), dataclasses.replace(METHOD_TABLE[name].config(), **settings)))
    for seed in range(2):
        images = random_images(4, seed)
        torch.manual_seed(seed)
        prediction = predict_and_learn(pipeline, images)
        torch.manual_seed(seed)
        alone = plain(images)
        with torch.no_grad():
            probs = (alone.softmax(1) + source(shifted(images)).softmax(1)) / 2
        torch.testing.assert_close(prediction.logits.softmax(1), probs, rtol=0, atol=1e-5)
        assert prediction.weight == 0.5
        torch.testing.assert_close(prediction.adapted, alone, rtol=0, atol=0)
    assert same_tensors(pipeline.delta(), plain.delta())


def test_there_is_no_guard_where_nothing_needs_one() -> None:
    for answer in ("adapted", "both"):
        assert guard_for(build_method("source", tiny_vit()), GuardOptions(answer=answer)) is None
    episodic = REMConfig(episodic=True)
    assert guard_for(build_method("rem", tiny_vit(), episodic), GuardOptions()) is None
    lame = build_method("lame", tiny_vit())
    assert guard_for(lame, GuardOptions()) is None
    mixed = guard_for(lame, GuardOptions(answer="both"))
    assert mixed is not None and mixed.options.action == "off"
    assert guard_for(build_method("tent", tiny_vit()), GuardOptions(action="off")) is None
    fast = build_method("fast", tiny_vit())  # without batch norms its weights and statistics are the source's
    assert guard_for(fast, GuardOptions(action="off", answer="both")) is None


def test_frames_that_are_not_learned_from_are_predicted_alike() -> None:
    """A prediction does not depend on which frames of its batch are learned from."""
    pipeline = pipeline_of("rem", "both", lr=0.05)
    images, learnable = random_images(6, 3), torch.tensor([True, False, True, True, False, True])
    for _ in range(3):
        adapted = pipeline.method.predict(images)
        source = source_logits(pipeline.method, shifted(images))
        prediction = predict_and_learn(pipeline, images, learnable)
        assert 0 < prediction.weight < 1
        torch.testing.assert_close(prediction.adapted, adapted, rtol=0, atol=1e-5)
        torch.testing.assert_close(prediction.source, source, rtol=0, atol=1e-5)
        expected = mixture(adapted, source, prediction.weight)
        torch.testing.assert_close(prediction.logits.exp(), expected.exp(), rtol=0, atol=1e-5)


def test_the_source_model_sees_shifted_images_only_if_both_models_predict() -> None:
    images, source = random_images(4, 0), tiny_vit()
    moved = shifted(images)
    assert moved.shape == images.shape
    torch.testing.assert_close(moved[..., 1:, 1:], images[..., :-1, :-1], rtol=0, atol=0)  # by one of 32 pixels
    large = torch.rand(1, 3, 224, 112)
    torch.testing.assert_close(shifted(large)[..., 8:, 4:], large[..., :-8, :-4], rtol=0, atol=0)
    expected: dict[Answer, Tensor] = {"adapted": source(images), "both": source(moved)}
    for answer, logits in expected.items():
        prediction = pipeline_of("rem", answer, action="rollback").predict(images)
        torch.testing.assert_close(prediction.source, logits, rtol=0, atol=1e-5)
    retired = pipeline_of("rem", "both", action="rollback")
    assert retired.guard is not None
    retired.guard.status.disabled = True
    torch.testing.assert_close(retired(images), source(images), rtol=0, atol=1e-5)  # alone, it predicts as deployed
    assert retired.num_source_predictions == 0  # the only pass of each image
    model = timm.create_model("test_efficientnet", num_classes=5).eval()
    method = build_method("tent", copy.deepcopy(model), TentConfig())
    convolutional = Pipeline(method, guard_for(method, GuardOptions("off", "both")))
    torch.testing.assert_close(convolutional.predict(images).source, model(images), rtol=0, atol=1e-5)


def test_predictions_with_low_latency_are_the_same() -> None:
    early, late = pipeline_of("rem", "both", lr=0.05), pipeline_of("rem", "both", lr=0.05)
    for seed in range(3):
        images = random_images(5, seed)
        prediction = early.predict(images, latency=True)
        early.learn()
        torch.testing.assert_close(prediction.logits, late(images), rtol=0, atol=1e-5)
    assert early.num_source_predictions == late.num_source_predictions == 15
    torch.testing.assert_close(early.delta(), late.delta(), rtol=0, atol=1e-5)


def test_rows_tell_which_model_predicted_and_where_the_models_disagree(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "remtta.pipeline.pipeline.shifted", lambda images: images
    )  # so that the rows of a source run are the same

    def go(name: str, guard: GuardOptions | None, method: str = "rem") -> RunSummary:
        return adapt_tiny(frames, tmp_path / name, method, model=tiny_vit(depth=4), options={"guard": guard})

    summary = go("both", GuardOptions("rollback", "both"))
    go("alone", None)
    go("off", GuardOptions("off", "both"))
    assert (tmp_path / "both" / "events.jsonl").exists() and not (tmp_path / "off" / "events.jsonl").exists()
    go("source", None, "source")
    rows, alone, source = (rows_of(tmp_path / name) for name in ("both", "alone", "source"))
    assert {(row["answered_by"], row["weight"]) for row in rows} == {("both", 0.5)}
    assert any("each" in row for row in rows)
    for row, one, other in zip(rows, alone, source, strict=True):
        assert ("each" in row) == (one["class"] != other["class"])
        for name, wanted in {"adapted": one, "source": other}.items() if "each" in row else ():
            assert row["each"][name]["class"] == wanted["class"]
            assert row["each"][name]["prob"] == pytest.approx(wanted["prob"], abs=1e-5)
        assert row["update"] == one["update"]
    assert summary.progress.by_both == len(rows) and f"predicted by both models: {len(rows)} frames" in summary.report()
    guard = record_of(tmp_path / "both")["guard"]
    told = {"alarms": 0, "retired": False, "answered_by_source": 0, "answered_by_both": len(rows)}
    assert guard == {**told, "lead": guard["lead"]}


def test_remtta_is_centered_rem_with_a_rate_and_its_anchor() -> None:
    ours = method_config("remtta", {}, batch_size=50)
    assert 0 < ours.anchor < 1 and ours.anchor == pytest.approx(1 - math.exp(-10 * ours.lr))
    published = dataclasses.asdict(METHOD_TABLE["rem"].config())
    framed = {"lr": ours.lr, "anchor": ours.anchor, "center": True, "bn": "recent", "adapt_layers": "all"}
    loss = {"mask_ratios": (0.0, 0.2), "ranking_weight": 2.0, "margin": 1.0}
    assert dataclasses.asdict(ours) == {**published, **framed, **loss}
    small, twenty = (method_config("remtta", {}, batch_size=size) for size in (4, 20))
    assert twenty == ours and small.lr == pytest.approx(ours.lr / 5)
    assert small.anchor == pytest.approx(1 - math.exp(-10 * small.lr))
    slower = method_config("remtta", {"lr": 1e-3}, batch_size=5)
    assert slower.anchor == pytest.approx(1 - math.exp(-0.01))
    assert method_config("remtta", {"anchor": 0}, batch_size=50).anchor == 0
    sgd = method_config("remtta", {"optimizer": "sgd"}, batch_size=50)
    assert (sgd.lr, sgd.anchor, sgd.center) == (1e-3, 0.0, True)  # the pair is Adam's
    assert method_config("fast", {"bn": "running"}, batch_size=50) == METHOD_TABLE["center"].config()
    assert build_method("remtta", tiny_vit()).config == ours


def test_the_old_name_light_is_remtta_on_every_second_batch(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_deprecated.cache_clear()
    assert method_config("light", {}, batch_size=50) == method_config("remtta", {"adapt_every": 2}, batch_size=50)
    assert METHOD_TABLE["light"].method is METHOD_TABLE["remtta"].method
    assert METHOD_TABLE["light"].preset.action == METHOD_TABLE["remtta"].preset.action == "rollback"
    assert METHOD_TABLE["light"].preset.answer == METHOD_TABLE["remtta"].preset.answer == "both"
    assert caplog.messages == [
        "the method light is deprecated: use remtta with adapt_every=2 (--adapt-every 2)"  # once
    ]


def test_a_methods_name_selects_its_settings(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny = [*TINY_OPTIONS, "--checkpoint", str(checkpoint), "--batch-size", "4"]

    def go(name: str, *options: str) -> dict[str, Any]:
        assert remtta_here("adapt", frames, *tiny, "--output", tmp_path / name, "-q", *options) == 0
        return record_of(tmp_path / name)

    def lines(name: str) -> bytes:
        return (tmp_path / name / "predictions.jsonl").read_bytes()

    ours, paper = go("ours"), go("paper", "--method", "rem")
    spelt = ("--lr", "0.002", "--anchor", "auto", "--answer", "both", "--guard", "rollback", "--set", "center=true")
    own = go("own", *spelt, "--set", "bn=recent", "--adapt-layers", "all", "--mask-ratios", "0,0.2", "--lambda", "2")
    assert ours["method"] == own["method"]
    assert ours["options"]["guard"] == own["options"]["guard"] and lines("ours") == lines("own")
    assert (paper["method"]["lr"], paper["method"]["anchor"], paper["guard"]) == (1e-3, 0.0, None)
    assert not any("answered_by" in row for row in rows_of(tmp_path / "paper"))
    go("plain", "--method", "rem", "--lr", "1e-3", "--anchor", "0", "--guard", "off", "--answer", "adapted")
    assert lines("plain") == lines("paper")
    capfd.readouterr()
    none = ("--output", str(tmp_path / "none"))
    for options, told in (
        (("--anchor", "much"), "--anchor takes a number or auto, got much"),
        (("--method", "tent", "--anchor", "auto"), "where the optimizer is not adam"),
        (("--method", "tent", "--lambda", "2"), "tent has no --lambda; remtta methods tent lists its settings"),
        (("--method", "lame", "--lr", "1"), "lame has no --lr;"),
    ):
        assert told in refusal_of(capfd, "adapt", frames, *tiny, *options, *none)


def test_a_doubt_ends_within_its_patience() -> None:
    """Either the adapted model is trusted again, or it starts again; that is no alarm, and costs no learning rate."""
    detector = Guard(GuardOptions(answer="both", min_frames=10, window=20, check_every=1, patience=60, class_history=1))
    noise = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    source = noise + logits_of([number % 5 for number in range(20)])
    behind = source.clone()
    behind[:, 3] += 3
    restores = [detector.compare(source, behind, drift=0.01) for _ in range(8)]
    assert restores == [False, False, False, True] * 2
    events = detector.events()
    assert [event["event"] for event in events] == ["doubt", "restart"] * 2
    assert {event["lr_scale"] for event in events} == {1} and detector.status.total_alarms == 0
    assert detector.state == "trust"
    assert "back to the source weights" in describe(events[1]) and events[1]["lead"] < -0.04
    for _ in range(2):
        detector.compare(source, behind, drift=0.01)
    detector.compare(source, source, drift=0.01)
    assert [event["event"] for event in detector.events()] == ["doubt", "trust"]
