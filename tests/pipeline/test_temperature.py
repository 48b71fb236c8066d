"""Confidences of the ensemble say how often it is right."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta.methods.table import method_config
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
        raw_source=source,
        weight=0.5,
        learned=torch.ones(BATCH, dtype=torch.bool),
    ), labels


def test_confidences_approach_the_accuracy_and_classes_stay() -> None:
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES, trains=True)
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
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES, trains=True)
    prediction, _ = predict(generator, 3.0)
    assert prediction.adapted is not None
    scaling(replace(prediction, adapted=prediction.adapted.roll(1, 1)))
    assert scaling.temperature > 1


def centered(changed: int, num_classes: int, confidence: float = 1.0) -> Prediction:
    """Predictions that centering changed for so many images of the batch."""
    raw = torch.zeros(BATCH, num_classes)
    raw[:, 0] = confidence * math.log(num_classes)
    logits = raw.clone()
    logits[:changed] = logits[:changed].roll(1, 1)
    return Prediction(logits, torch.ones(BATCH, dtype=torch.bool), adapted=logits, raw_adapted=raw)


def test_centered_predictions_stay_as_confident_as_before_centering() -> None:
    prediction = replace(centered(0, 1000), logits=0.8 * centered(0, 1000).logits)
    scaling = TemperatureScaling(1000, trains=False)
    for _ in range(60):
        scaled = scaling(prediction)
    assert scaled.temperature == pytest.approx(0.8, abs=0.02)


def test_what_centering_changed_raises_confidence_with_many_classes_and_lowers_it_with_few() -> None:
    for num_classes, raises in ((1000, True), (7, False)):
        scaling = TemperatureScaling(num_classes, trains=False)
        scaling(centered(BATCH // 2, num_classes))
        assert (scaling.temperature < 1) is raises
        scaling = TemperatureScaling(num_classes, trains=False)
        scaling(centered(0, num_classes))
        assert scaling.temperature == pytest.approx(1)


def test_an_ensemble_that_changed_predictions_is_less_confident_than_its_models_agree() -> None:
    few = 0.5 ** (1.25 - 0.75 * math.log(7) / math.log(1000))
    for num_classes, changed_rate, unchanged_rate in ((7, few, 0.95), (1000, 0.5**0.5, 0.99)):  # 0.95: the bound allows
        changed = centered(BATCH // 2, num_classes)
        logits, learned, raw = 2 * changed.logits, changed.learned, changed.raw_adapted
        prediction = Prediction(logits, learned, weight=0.5, source=logits, adapted=logits, raw_source=raw)
        for moves, rate in ((False, changed_rate), (True, unchanged_rate)):
            scaling = TemperatureScaling(num_classes, trains=True, moves=moves)
            for _ in range(60):
                confidence = float(scaling(prediction).logits.softmax(1).amax(1).mean())
            assert confidence == pytest.approx(rate, abs=0.02)


def test_an_ensemble_without_training_is_more_accurate_where_its_models_disagree() -> None:
    prediction, _ = predict(torch.Generator().manual_seed(0), 1.0)
    temperatures = []
    for trains in (False, True):
        scaling = TemperatureScaling(CLASSES, trains=trains)
        scaling(prediction)
        temperatures.append(scaling.temperature)
    assert temperatures[0] < temperatures[1]


def test_images_that_are_not_finite_do_not_count() -> None:
    prediction = centered(BATCH // 2, 7)
    scaling, expected = TemperatureScaling(7, trains=False), TemperatureScaling(7, trains=False)
    broken: dict[str, Any] = {
        name: torch.cat([getattr(prediction, name), torch.full((1, 7), math.nan)])
        for name in ("logits", "adapted", "raw_adapted")
    }
    scaling(replace(prediction, learned=torch.ones(BATCH + 1, dtype=torch.bool), **broken))
    expected(prediction)
    assert scaling.temperature == expected.temperature != 1


def test_where_the_source_model_is_ruined_confidences_follow_what_the_adapted_one_gained() -> None:
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES, trains=True)
    for _ in range(60):
        prediction, labels = predict(generator, 2.0)
        assert prediction.adapted is not None
        source = torch.randn(BATCH, CLASSES, generator=generator)
        prediction = replace(
            prediction, source=source, raw_source=source, logits=mixture(prediction.adapted, source, 0.5)
        )
        prediction = scaling(prediction)
    assert (prediction.logits.argmax(1) == labels).float().mean() > 0.5
    assert scaling.temperature < 1


def test_only_both_models_on_learned_images_count() -> None:
    prediction, _ = predict(torch.Generator().manual_seed(0), 3.0)
    scaling = TemperatureScaling(CLASSES, trains=True)
    for change in (
        {"weight": 0.0},
        {"learned": torch.zeros(BATCH, dtype=torch.bool)},
        {"harmful": True},
        {"logits": prediction.logits * math.nan},
        {"source": None, "adapted": None},  # one pass with weights between both models'
    ):
        scaling(replace(prediction, **change))
        assert scaling.temperature == 1
    scaling(prediction)
    assert scaling.temperature != 1


def test_the_state_is_restored_and_a_reset_leads_back_to_one() -> None:
    generator, scaling, restored = (
        torch.Generator().manual_seed(0),
        TemperatureScaling(CLASSES, trains=True),
        TemperatureScaling(CLASSES, trains=True),
    )
    scaling(predict(generator, 3.0)[0])
    restored.load_state_dict(scaling.state_dict())
    assert restored.temperature == scaling.temperature != 1
    restored.load_state_dict({})  # of a run of 0.5.0
    assert restored.temperature == 1
    scaling.on_reset()
    assert scaling.temperature == 1


def test_between_updates_the_temperature_stays_in_force() -> None:
    generator, scaling = torch.Generator().manual_seed(0), TemperatureScaling(CLASSES, trains=True)
    scaling(predict(generator, 3.0)[0])
    prediction, temperature = predict(generator, 3.0)[0], scaling.temperature
    scaled = scaling(replace(prediction, source=None, adapted=None))
    assert scaled.temperature == scaling.temperature == temperature != 1
    torch.testing.assert_close(scaled.logits * temperature, prediction.logits)


def test_rows_have_the_temperature_of_an_ensemble_and_of_centered_logits(tmp_path: Path) -> None:
    frames = draw_folder(tmp_path / "frames", range(9))
    for answer in ("both", "adapted"):
        adapt_tiny(frames, tmp_path / answer, options={"guard": GuardOptions("rollback", answer)})
        has = ["temperature" in row for row in rows_of(tmp_path / answer)]
        assert has == [answer == "both"] * 9
    for method in ("center", "source"):
        adapt_tiny(frames, tmp_path / method, method, config=method_config(method, {}, batch_size=3))
        has = ["temperature" in row for row in rows_of(tmp_path / method)]
        assert has == [method == "center"] * 9
