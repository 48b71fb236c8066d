"""Check a file that adapts itself against the method `fast`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import torch

from remtta.errors import RemttaError, first_line
from remtta.formats.adaptive.centering import state_size
from remtta.formats.adaptive.wrapping import Classifier
from remtta.models.info import model_info
from remtta.pipeline.build import AdaptationConfig, build_pipeline

if TYPE_CHECKING:
    from remtta.formats.onnx_model import OnnxClassifier

_IMAGES = 18  # two of them with a view
_BATCH = 6


@torch.inference_mode()
def write_checked(path: Path, content: bytes, model: OnnxClassifier, classifier: Classifier, tolerance: float) -> None:
    """Write a file; raise RemttaError if a probability of random images differs by more than a tolerance."""
    path.write_bytes(content)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # its own exceptions, which onnxruntime does not expose
        reason = first_line(error)[:200]
        raise RemttaError(f"onnxruntime cannot load the file with the adaptation: {reason}") from error
    pipeline = build_pipeline(model, model_info(model), AdaptationConfig("fast").with_guard())
    size, generator = classifier.batch or _BATCH, torch.Generator().manual_seed(0)
    state = np.zeros(state_size(classifier.num_classes), np.float32)
    for _ in range(0, _IMAGES, size):
        images = torch.randint(256, (size, 3, *classifier.image_size), generator=generator) / 255  # also of pixels
        returned, state, _ = session.run(None, {"images": model.as_input(images), "state": state})
        probabilities = torch.from_numpy(returned)
        probabilities = probabilities.softmax(-1) if classifier.least is None else probabilities
        difference = float((probabilities - pipeline(images).softmax(-1)).abs().max())
        if not difference <= tolerance:
            raise RemttaError(f"the file predicts otherwise than fast, by {difference:.1e}; nothing was written")
