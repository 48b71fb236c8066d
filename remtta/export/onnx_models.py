"""Export the adapted model to ONNX, from scratch or by replacing the norms of an earlier export."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta.backbones.norms import norm_modules
from remtta.errors import DeltaError, RemttaError, UsageError, first_line, needed
from remtta.export.adapted import AdaptedModel

FILE = "model.onnx"
_MAX_BYTES = 2**31 - 1  # of a protobuf message
_INT8 = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")


def write_onnx(adapted: AdaptedModel, folder: Path, onto: Path | None = None) -> None:
    """Write `model.onnx`: normalised images (B, 3, H, W) to logits (B, C), for any B.

    `onto` is an ONNX file of the same base, of which only the norms are replaced.

    Raises:
        UsageError: If a package is missing, or the file does not exist.
        DeltaError: If the ONNX file has other weights, or no norms to replace.
        RemttaError: If the model cannot be exported, or its logits differ from torch's.
    """
    onnx = needed("onnx", "export", "an export")
    proto = _exported(adapted) if onto is None else _patched(adapted, onto)
    known = {entry.key for entry in proto.metadata_props} & adapted.facts.keys()
    for entry in [entry for entry in proto.metadata_props if entry.key in known]:
        proto.metadata_props.remove(entry)
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


def _exported(adapted: AdaptedModel) -> Any:
    needed("onnxscript", "export", "an export")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Not optimised: folding batch norms, merging equal tensors and transposing weights would make it impossible
            # to put in a later delta by name. Runtimes optimise when they load.
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
            raise RemttaError(f"torch cannot export {adapted.delta.model} to ONNX: {_shown(error)}") from error
    assert program is not None
    proto = program.model_proto
    del proto.graph.value_info[:]  # intermediate shapes, which onnxruntime's quantiser cannot handle
    return proto


def _patched(adapted: AdaptedModel, path: Path) -> Any:
    """Return an ONNX model with its norms replaced by the adapted ones."""
    onnx = needed("onnx", "export", "an export")
    if not path.is_file():
        raise UsageError(f"{path}: no such ONNX file")
    try:
        proto = onnx.load(str(path))
        tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
        values = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    except Exception as error:  # of protobuf, numpy or the system
        raise UsageError(f"{path} is not a readable ONNX file: {_shown(error)}") from error
    used = sorted({node.op_type for node in proto.graph.node} & {*_INT8, "QLinearConv", "QLinearMatMul"})
    if used:
        raise DeltaError(
            f"{path} is quantised to INT8 ({used[0]}), with scales chosen for its own weights; patch the "
            "ONNX it was made from, and quantise that"
        )
    for name, value in _replaced(adapted, values, path).items():
        tensors[name].CopyFrom(onnx.numpy_helper.from_array(value, name))
    return proto


def _replaced(adapted: AdaptedModel, values: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Return the new values of the norms by name, after checking that all other tensors equal the base's."""
    state = {name: tensor.numpy() for name, tensor in adapted.model.state_dict().items()}
    norms = {
        f"{layer}.{name}" if layer else name
        for layer, module in norm_modules(adapted.model).items()
        for name in module.state_dict()
    } | adapted.delta.tensors.keys()
    missing = sorted(adapted.delta.tensors.keys() - values.keys())
    if missing:
        raise DeltaError(
            f"{path} has no tensor {missing[0]} ({len(missing)} in all): its norms were folded into other "
            "weights, or it is of another model; export without --delta-only"
        )
    found = {name: state[name] for name in values.keys() & state.keys()}
    for name, value in found.items():
        fits = value.shape == values[name].shape and value.dtype == values[name].dtype
        if not fits or (name not in norms and not np.array_equal(value, values[name])):
            raise DeltaError(f"{path} was made from other weights than the delta's base: {name} differs")
    return {name: value for name, value in found.items() if name in norms}


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:200]}"
