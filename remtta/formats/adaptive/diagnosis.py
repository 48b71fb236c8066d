"""Check whether a file that adapts itself does what it should, for `remtta doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta.errors import CheckpointError
from remtta.formats.adaptive.centering import STATUS, state_sizes
from remtta.formats.adaptive.writing import NORM_CHANNELS, PATCH_SIZE
from remtta.formats.onnx_graph import OnnxGraph
from remtta.formats.onnx_model import COARSE, FAMILIES, OnnxBackbone, OnnxClassifier
from remtta.models.info import model_info
from remtta.pipeline.build import AdaptationConfig, build_pipeline


class AdaptiveFile(OnnxClassifier):
    """The classifier in a file that adapts itself, which does not center the logits of a stream's first image."""

    def __init__(self, graph: OnnxGraph, *args: Any, **kwargs: Any) -> None:
        super().__init__(graph, *args, **kwargs)
        self.batch = self.batch or 1
        self.tolerance = COARSE if graph.rounds or self._type == "f2" else self.tolerance
        try:
            height, width = map(int, json.loads(graph.metadata[PATCH_SIZE]))
            self._num_channels = int(graph.metadata.get(NORM_CHANNELS, "0"))
        except (ValueError, TypeError, LookupError) as error:
            raise CheckpointError(f"{self.path} has no valid {PATCH_SIZE} in its metadata; export it again") from error
        self.patch_size = (height, width)

    def open_session(self, model: str | bytes) -> Any:
        session = super().open_session(model)
        names = [each.name for each in (*session.get_inputs(), *session.get_outputs())]
        shape = session.get_inputs()[-1].shape
        if [*names[:2], *names[3:]] != ["images", "state", "next_state", "status"] or not isinstance(shape[0], int):
            text = f"{self.path} has no state of fixed length among its inputs and outputs {', '.join(names)}"
            raise CheckpointError(f"{text}; export it again")
        self._others = {"state": np.zeros(shape, np.float32)}
        return session

    @torch.inference_mode()
    def diagnose(self, images: Tensor, wait: Callable[[], None]) -> dict[str, bool | float]:
        """Return checks and measurements on a stream of images (N, 3, H, W) in uint8; `wait` may raise to stop."""
        size, info = self.batch or 1, model_info(self)
        repeated = torch.arange(-(-len(images) // size) * size) % len(images)  # in whole batches
        batches, half = info.preprocessing.normalise(images[repeated]).split(size), len(images) // size // 2
        zero, length = self._others["state"], sum(state_sizes(info.num_classes, self._num_channels).values())
        began = time.perf_counter()
        values, states, statuses = self._adapt(batches, zero, wait)
        seconds = (time.perf_counter() - began) / len(repeated)
        self._session = None  # a restart
        again, resumed, _ = self._adapt(batches[half:], [zero, *states][half], wait)
        status = dict(zip(STATUS, map(float, statuses[-1]), strict=True))
        found: dict[str, bool | float] = {
            "state_keeps_its_size": zero.size == states[0].size == length,
            "predictions_are_finite": bool(np.isfinite(values).all()),
            "images_are_counted": status["images"] == len(repeated),
            "stored_state_continues_exactly": _equal(again, values[half:]) and _equal(resumed, states[half:]),
        }
        if not self.normalises:  # else it takes pixels, among which there is no NaN
            _, after, _ = self._adapt([torch.full_like(batches[0], torch.nan)], states[-1], wait)
            found["nan_leaves_state"] = _equal(after[0], states[-1])
        if size == 1 and not self._num_channels:  # else no call returns the source model's prediction of an image
            difference = self._difference(batches, values, wait)
            found |= {"predicts_as_fast": difference <= self.tolerance, "difference_of_probability": difference}
        status["images_seen"] = status.pop("images")
        return {**found, **status, "state_numbers": length, "ms_per_image": 1000 * seconds}

    def _adapt(self, batches: Sequence[Tensor], state: np.ndarray, wait: Callable[[], None]) -> list[np.ndarray]:
        """Return predictions, states and statuses after each batch of a stream that continues from a state."""
        returned = []
        for images in batches:
            wait()
            returned.append(self._call(images, [self.output_name, "next_state", "status"], state=state))
            state = returned[-1][1]
        return [np.stack(each) for each in zip(*returned, strict=True)]

    def _difference(self, batches: Sequence[Tensor], values: np.ndarray, wait: Callable[[], None]) -> float:
        """Return the largest difference of a probability from that of `fast` on the classifier."""
        pipeline, differences = build_pipeline(self, model_info(self), AdaptationConfig("fast").with_guard()), []
        for images, returned in zip(batches, map(torch.from_numpy, values), strict=True):
            wait()
            probabilities = returned if self.returns_probabilities else returned.softmax(-1)
            differences.append((probabilities - pipeline(images).softmax(-1)).abs().max())
        return float(torch.stack(differences).max())


FAMILIES[AdaptiveFile] = OnnxBackbone


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    return first.tobytes() == second.tobytes()
