"""Run callbacks and pipelines on a single batch."""

from typing import Any

from torch import Tensor

from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.prediction import Callback, Prediction


def notify(callback: Callback, logits: Tensor, **fields: Any) -> Tensor:
    """Pass logits (B, C) of the next frames to a callback; return the logits that it leaves."""
    prediction = Prediction(**{"logits": logits, "raw_adapted": logits, **fields})
    callback.on_prediction(prediction)
    return prediction.logits


def predict_and_learn(pipeline: Pipeline, images: Tensor, learnable: Tensor | None = None) -> Prediction:
    """Return the prediction for a batch that the pipeline learns from."""
    prediction = pipeline.predict(images, learnable)
    pipeline.learn()
    return prediction
