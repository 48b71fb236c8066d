"""Export the adapted model to ONNX."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from remtta.errors import RemttaError, UsageError, first_line, needed
from remtta.export.adapted import ExportableModel

FILE = "model.onnx"
_MAX_BYTES = 2**31 - 1  # of a protobuf message


def write_onnx(adapted: ExportableModel, folder: Path) -> None:
    """Write `model.onnx`: normalised images (B, 3, H, W) to logits (B, C), for any B. Raise UsageError if a package is
    missing, or the model is too large for one file; RemttaError if the model cannot be exported, or its logits differ
    from torch's.
    """
    onnx = needed("onnx", "export", "an export")
    proto = _exported(adapted)
    onnx.helper.set_model_props(proto, {**{entry.key: entry.value for entry in proto.metadata_props}, **adapted.facts})
    if proto.ByteSize() > _MAX_BYTES:
        raise UsageError(
            f"the model takes {proto.ByteSize() / 1e9:.1f} GB, and one ONNX file holds at most 2; use --format timm"
        )
    content = proto.SerializeToString()
    adapted.check("onnxruntime", _runner(content))
    (folder / FILE).write_bytes(content)


def _runner(content: bytes) -> Any:
    runtime = needed("onnxruntime", "export", "an export")
    try:
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
    except Exception as error:  # its own exceptions, which onnxruntime does not expose
        raise RemttaError(f"onnxruntime cannot load it: {_shown(error)}") from error

    def answer(images: Tensor) -> Any:
        try:
            return session.run(None, {name: images.numpy()})[0]
        except Exception as error:
            raise RemttaError(f"onnxruntime cannot run it on {len(images)} images: {_shown(error)}") from error

    return answer


def _exported(adapted: ExportableModel) -> Any:
    # Of other kernels, torch cannot export those with a bias.
    with warnings.catch_warnings(action="ignore"), sdpa_kernel(SDPBackend.MATH):
        try:
            # Not optimised, so that tensors keep the model's names; runtimes optimise when they load.
            program = torch.onnx.export(
                adapted.model,
                (adapted.images(2),),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # anything, e.g. from code not made for tracing
            reason = _shown(error.__cause__ or error)  # torch's own words are on how to report it
            raise RemttaError(
                f"torch cannot export {adapted.delta.model} to ONNX: {reason}; use --format timm"
            ) from error
    assert program is not None
    proto = program.model_proto
    del proto.graph.value_info[:]  # intermediate shapes, which onnxruntime's quantiser cannot handle
    return proto


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)[:200]}"
