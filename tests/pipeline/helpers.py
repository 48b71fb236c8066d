"""Run transforms and pipelines on a single batch."""

from typing import Any

import torch
from torch import Tensor

from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.prediction import Prediction, PredictionTransform


def transformed(transform: PredictionTransform, logits: Tensor, **fields: Any) -> Tensor:
    """Return logits (B, C) of the next frames as a transform changes them."""
    learned = torch.ones(len(logits), dtype=torch.bool)
    prediction = Prediction(**{"logits": logits, "learned": learned, "raw_adapted": logits, **fields})
    return transform(prediction).logits


def predict_and_learn(pipeline: Pipeline, images: Tensor, learnable: Tensor | None = None) -> Prediction:
    """Return the prediction for a batch that the pipeline learns from."""
    prediction = pipeline.predict(images, learnable)
    pipeline.learn()
    return prediction
