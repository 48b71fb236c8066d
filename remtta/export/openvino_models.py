"""OpenVINO's intermediate representation of the adapted model, by way of its ONNX."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from remtta.export.adapted import AdaptedModel, needed
from remtta.export.onnx_models import FILE, write_onnx

_log = logging.getLogger("remtta")


def write_openvino(adapted: AdaptedModel, folder: Path) -> None:
    """Write `model.xml` and `model.bin`, with the same input and output as the ONNX, in float32.

    Raises:
        UsageError: If a package is missing.
        RemttaError: If the model cannot be exported, or answers otherwise than torch does.
    """
    openvino = needed("openvino", "openvino")
    with tempfile.TemporaryDirectory() as place:
        write_onnx(adapted, Path(place))
        network = openvino.Core().read_model(str(Path(place, FILE)))  # not convert_model, which reports to Intel
    for name, fact in adapted.facts.items():
        network.set_rt_info(fact, ["remtta", name])
    compiled = openvino.Core().compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def answer(images: np.ndarray) -> Any:
        return compiled(images)[0]

    _log.info("OpenVINO: logits within %.1e of torch's", adapted.check("OpenVINO", answer))
    openvino.save_model(network, str(folder / "model.xml"), compress_to_fp16=False)
