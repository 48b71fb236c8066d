"""Confidences of the ensemble say how often it is right."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from remtta.options import GuardOptions
from remtta.pipeline.information import mixture
from remtta.pipeline.prediction import Prediction
from remtta.pipeline.temperature import TemperatureScaling
from tests.conftest import draw_folder
from tests.records import rows_of
from tests.runs.tiny import adapt_tiny

CLASSES, BATCH = 100, 50


def predict(generator: torch.Generator, confidence: float) -> tuple[Prediction, Tensor]:
    """The predictions of two models that err independently, with logits scaled by `confidence`; and the labels."""
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    truth = torch.nn.functional.one_hot(labels, CLASSES)
    source, adapted = (confidence * (4 * truth + torch.randn(BATCH, CLASSES, generator=generator)) for _ in range(2))
    return Prediction(
        logits=mixture(adapted, source, 0.5),
        source=source,
        adapted=adapted,
        weight=0.5,
        learned=torch.ones(BATCH, dtype=torch.bool),
    ), labels


def test_confidences_approach_the_accuracy_and_classes_stay() -> None:
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES)
    gaps = []
    for _ in range(60):
        prediction, labels = predict(generator, 0.8)
        before = prediction.logits
        prediction = scaling(prediction)
        assert prediction.logits.argmax(1).equal(before.argmax(1))
        assert prediction.temperature is not None
        torch.testing.assert_close(prediction.logits * prediction.temperature, before)
        accuracy = (before.argmax(1) == labels).float().mean()
        gaps.append([float(z.softmax(1).amax(1).mean() - accuracy) for z in (before, prediction.logits)])
    before, after = torch.tensor(gaps[30:]).mean(0).abs().tolist()
    assert before > 0.05
    assert after < 0.8 * before
    assert scaling.temperature < 1


def test_models_that_disagree_are_less_confident() -> None:
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES)
    prediction, _ = predict(generator, 3.0)
    assert prediction.adapted is not None
    scaling(replace(prediction, adapted=prediction.adapted.roll(1, 1)))
    assert scaling.temperature > 1


def test_where_the_source_model_is_ruined_confidences_follow_what_the_adapted_one_gained() -> None:
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES)
    for _ in range(60):
        prediction, labels = predict(generator, 2.0)
        assert prediction.adapted is not None
        source = torch.randn(BATCH, CLASSES, generator=generator)
        prediction = replace(prediction, source=source, logits=mixture(prediction.adapted, source, 0.5))
        prediction = scaling(prediction)
    assert (prediction.logits.argmax(1) == labels).float().mean() > 0.5
    assert scaling.temperature < 1


def test_only_both_models_on_learned_images_count() -> None:
    prediction, _ = predict(torch.Generator().manual_seed(0), 3.0)
    scaling = TemperatureScaling(CLASSES)
    for change in (
        {"source": None},
        {"weight": 0.0},
        {"learned": torch.zeros(BATCH, dtype=torch.bool)},
        {"harmful": True},
        {"logits": prediction.logits * math.nan},
    ):
        scaling(replace(prediction, **change))
        assert scaling.temperature == 1
    scaling(prediction)
    assert scaling.temperature != 1


def test_the_state_is_restored_and_a_reset_leads_back_to_one() -> None:
    generator, scaling, restored = (
        torch.Generator().manual_seed(0),
        TemperatureScaling(CLASSES),
        TemperatureScaling(CLASSES),
    )
    scaling(predict(generator, 3.0)[0])
    restored.load_state_dict(scaling.state_dict())
    assert restored.temperature == scaling.temperature != 1
    restored.load_state_dict({})  # of a run of 0.5.0
    assert restored.temperature == 1
    scaling.on_reset()
    assert scaling.temperature == 1


def test_rows_have_the_temperature_of_an_ensemble(tmp_path: Path) -> None:
    frames = draw_folder(tmp_path / "frames", range(9))
    for answer in ("both", "adapted"):
        adapt_tiny(frames, tmp_path / answer, options={"guard": GuardOptions("rollback", answer)})
        has = ["temperature" in row for row in rows_of(tmp_path / answer)]
        assert has == [answer == "both"] * 9
