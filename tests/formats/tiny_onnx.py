"""Tiny ONNX files, written node by node, and the same network in torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

NUM_CLASSES, SIDE, PATCH = 7, 32, 8


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"conv": (12, 3, PATCH, PATCH), "conv_bias": (12,), "fc": (NUM_CLASSES, 12), "fc_bias": (NUM_CLASSES,)}
    return {
        name: rng.normal(size=shape).astype(np.float32) / (10 if name == "conv" else 1)
        for name, shape in shapes.items()
    }


def tiny_network() -> nn.Module:
    """The network of `write_onnx`."""
    network = nn.Sequential(
        nn.Conv2d(3, 12, PATCH, PATCH), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 7)
    )
    with torch.no_grad():
        for parameter, values in zip(network.parameters(), weights().values(), strict=True):
            parameter.copy_(torch.from_numpy(values))
    return network.eval()


def write_onnx(
    path: Path,
    *,
    end: str = "Gemm",
    channels_last: bool = False,
    batch: int | str = "B",
    side: int | str = SIDE,
    kind: int = TensorProto.FLOAT,
    metadata: Mapping[str, str] | None = None,
    pooled: bool = True,
) -> Path:
    """Write a file that ends in a Gemm with bias, a MatMul without, a Softmax, an Exp-based softmax, a Sigmoid, a
    quantised Gemm or Softmax, two outputs, or is a detector. Without `pooled`, the order of patches matters.
    """
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    tensors: dict[str, Any] = {name: values.astype(dtype) for name, values in weights().items()}
    if not pooled:
        tensors["fc"] = np.random.default_rng(1).normal(size=(NUM_CLASSES, 12 * (SIDE // PATCH) ** 2)).astype(dtype)
    nodes: list[Any] = [helper.make_node("Transpose", ["images"], ["nchw"], perm=[0, 3, 1, 2])] if channels_last else []
    nodes += [
        helper.make_node(
            "Conv",
            [nodes[0].output[0] if nodes else "images", "conv", "conv_bias"],
            ["map"],
            strides=[PATCH] * 2,
            kernel_shape=[PATCH] * 2,
        ),
        helper.make_node("Relu", ["map"], ["relu"]),
        helper.make_node("GlobalAveragePool" if pooled else "Identity", ["relu"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["features"]),
    ]
    last = ["logits"]
    if end == "MatMul":
        tensors["fc"] = np.ascontiguousarray(tensors["fc"].T)
        nodes.append(helper.make_node("MatMul", ["features", "fc"], ["logits"]))
    else:
        nodes.append(helper.make_node("Gemm", ["features", "fc", "fc_bias"], ["logits"], transB=1))
    if end in ("Softmax", "Sigmoid"):
        nodes.append(helper.make_node(end, ["logits"], ["probs"]))
        last = ["probs"]
    if end == "exp":
        nodes.append(helper.make_node("Exp", ["logits"], ["e"]))
        nodes.append(helper.make_node("ReduceSum", ["e", "axes"], ["sum"], keepdims=1))
        nodes.append(helper.make_node("Div", ["e", "sum"], ["probs"]))
        tensors["axes"], last = np.array([1]), ["probs"]
    if end.startswith("quantised"):
        if end == "quantised Softmax":
            nodes.append(helper.make_node("Softmax", ["logits"], ["probs"]))
            last = ["probs"]
        tensors |= {
            "scale": np.float32(1 / 255 if last == ["probs"] else 0.05),
            "zero": np.uint8(0 if last == ["probs"] else 128),
        }
        nodes.append(helper.make_node("QuantizeLinear", [last[0], "scale", "zero"], ["q"]))
        nodes.append(helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["out"]))
        last = ["out"]
    if end == "two":
        last = ["logits", "features"]
    outputs = [
        helper.make_tensor_value_info(name, kind, [batch, tensors["fc"].size // 7 if name == "features" else 7])
        for name in last
    ]
    if end == "detector":
        nodes.append(helper.make_node("Unsqueeze", ["logits", "axes"], ["boxes"]))
        tensors["axes"] = np.array([1])
        outputs = [helper.make_tensor_value_info("boxes", kind, [batch, 1, NUM_CLASSES])]
    size = [side, side, 3] if channels_last else [3, side, side]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", kind, [batch, *size])],
        outputs,
        [numpy_helper.from_array(np.asarray(values), name) for name, values in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, dict(metadata or {}))
    onnx.save(model, path)
    return path
