"""Write a file that adapts itself, checked against the method `fast`."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import GraphProto, ModelProto, NodeProto, helper
from torch import Tensor, nn

from remtta.errors import RemttaError, UsageError, first_line
from remtta.files import write_atomically
from remtta.formats.adaptive.centering import STATUS
from remtta.formats.adaptive.norms import (
    NORM,
    Norm,
    add_measurements,
    find_norms,
    measured_norms,
    round_again,
)
from remtta.formats.adaptive.wrapping import wrap
from remtta.formats.onnx_graph import OnnxGraph, messages
from remtta.formats.onnx_model import COARSE, OnnxClassifier
from remtta.models.info import model_info
from remtta.models.tensor_files import state_sha256
from remtta.pipeline.build import AdaptationConfig, build_pipeline

PATCH_SIZE = "patch_size"
"""Key in the metadata of a file that adapts itself: height and width of the patches that it shuffles."""
NORM_CHANNELS = "norm_channels"
"""Key in the same metadata: number of channels of all batch norms that follow the stream, if there are any."""

_TEMPERATURE_TOLERANCE = 0.1
_BATCH, _NUM_BATCHES = 3, 6  # 18 images, two of them with a view
_PROVIDERS = ["CPUExecutionProvider"]


def write_adaptive(
    model: OnnxClassifier,
    path: Path,
    metadata: Mapping[str, str],
    *,
    original: nn.Module | None = None,
    clean: Iterable[Tensor] | None = None,
) -> None:
    """Write a file that adapts itself as the method `fast` adapts a model, atomically, and with more metadata.

    Raise as `OnnxClassifier.save`, and CheckpointError if the model's file is of an opset that is too old.

    Args:
        original: The model in torch, from which the model's file was exported.
        clean: Batches of source images (B, 3, H, W), to measure the convolutions into which norms were folded.
    """
    proto = model.shifted_graph().proto
    norms: Sequence[Norm] = find_norms(proto.graph)
    if clean is not None:
        if norms:
            raise UsageError(f"{model.path.name} has its batch norms; leave --source-data out")
        round_again(proto.graph)
        norms = _measure(model, proto, clean)
    parts = [bytes.fromhex(state_sha256(model)), *(norm.mean.tobytes() for norm in norms)]
    digest = hashlib.sha256(b"".join(parts)).digest() if norms else parts[0]
    reference = original or (_with_torch_norms(model, proto, norms) if norms else model)
    graph = OnnxGraph(wrap(proto, model, 1 + int.from_bytes(digest[:3]), norms), path)
    tolerance = COARSE if graph.rounds else model.tolerance  # other batches round otherwise
    num_channels = sum(len(norm.mean) for norm in norms)
    own = {PATCH_SIZE: json.dumps(model.patch_size)} | ({NORM_CHANNELS: str(num_channels)} if norms else {})
    content = graph.content({**metadata, **own})
    advice = "" if clean is None else "; give more, or other, images by --source-data"
    write_atomically(path, lambda temporary: _write_checked(temporary, content, model, reference, tolerance, advice))


def _measure(model: OnnxClassifier, proto: ModelProto, clean: Iterable[Tensor]) -> Sequence[Norm]:
    """Return norms for the convolutions of a graph, by batches of source images."""
    graph = OnnxGraph(copy.deepcopy(proto), model.path)
    outputs = [model.output_name, *add_measurements(graph.proto.graph)]
    measuring = model.run_by(model.open_session(graph.content({})))
    batches = [measuring.run(images, outputs)[1:] for images in clean]
    measured = [torch.cat(parts).numpy() for parts in zip(*batches, strict=True)]
    norms = measured_norms(graph.proto.graph, measured)
    if not norms:
        text = f"{model.path.name} has no convolutions that batch norms were folded into"
        raise UsageError(f"{text}; leave --source-data out")
    return norms


@torch.inference_mode()
def _write_checked(
    path: Path, content: bytes, model: OnnxClassifier, reference: nn.Module, tolerance: float, advice: str
) -> None:
    """Write a file; raise RemttaError if a probability of random images differs by more than a tolerance.

    Args:
        model: The classifier in the file.
        reference: The same with torch's batch norms, which `fast` adapts.
        advice: What to do if they differ.
    """
    path.write_bytes(content)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=_PROVIDERS)
    except Exception as error:  # its own exceptions, which onnxruntime does not expose
        reason = first_line(error)[:200]
        raise RemttaError(f"onnxruntime cannot load the file with the adaptation: {reason}") from error
    config = AdaptationConfig("fast", {"precision": "fp32"}).with_guard()
    pipeline = build_pipeline(reference, model_info(reference), config)
    size, generator = model.batch or _BATCH, torch.Generator().manual_seed(0)
    state = np.zeros(session.get_inputs()[1].shape, np.float32)
    for _ in range(0, _BATCH * _NUM_BATCHES, size):
        images = torch.randint(256, (size, 3, *model.image_size), generator=generator) / 255  # also of pixels
        returned, state, status = session.run(None, {"images": model.as_input(images), "state": state})
        probabilities, divisor = torch.from_numpy(returned), float(status[STATUS.index("temperature")])
        probabilities = probabilities.softmax(-1) if model.least is None else probabilities
        prediction = pipeline.predict(images)
        pipeline.learn()
        assert prediction.temperature is not None
        # A nearly equal class that rounding exchanges changes the temperature a little.
        expected = (prediction.logits * (prediction.temperature / divisor)).softmax(-1)
        difference = float((probabilities - expected).abs().max())
        if not (difference <= tolerance and abs(divisor - prediction.temperature) <= _TEMPERATURE_TOLERANCE):
            raise RemttaError(
                f"the file predicts otherwise than fast, by {difference:.1e}; nothing was written{advice}"
            )


def _with_torch_norms(model: OnnxClassifier, proto: ModelProto, norms: Sequence[Norm]) -> OnnxClassifier:
    """Return a classifier in an ONNX file with torch's batch norms, between parts that onnxruntime runs."""
    modules = [_batch_norm(norm) for norm in norms]
    model = model.run_by(_Parts(proto, model, list(zip(norms, modules, strict=True))))
    model.norms = nn.ModuleList(modules)  # where `fast` finds them
    return model


def _batch_norm(norm: Norm) -> nn.Module:
    module = nn.BatchNorm2d(len(norm.mean), norm.epsilon).eval()
    values = {"weight": norm.scale, "bias": norm.shift, "running_mean": norm.mean, "running_var": norm.variance}
    module.load_state_dict({name: torch.from_numpy(array) for name, array in values.items()}, False)
    return module


class _Parts:
    """Runs a graph as a session does, with batch norms in torch."""

    def __init__(self, proto: ModelProto, model: OnnxClassifier, norms: Sequence[tuple[Norm, nn.Module]]) -> None:
        graph, self._norms = proto.graph, norms
        makers = {name: node for node in graph.node for name in node.output}
        known = {each.name: each.type.tensor_type.elem_type for each in graph.input if each.name == model.input_name}
        self._parts = []
        for norm, _ in self._norms:
            node, kind = makers[norm.output], norm.kind
            self._parts.append(_part(proto, known, node.input[0] if node.op_type == NORM else norm.output, kind))
            known[norm.output] = kind
        kind = next(each.type.tensor_type.elem_type for each in graph.output if each.name == model.output_name)
        self._parts.append(_part(proto, known, model.output_name, kind))

    def run(self, outputs: Sequence[str], inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        values = dict(inputs)
        for part, (norm, module) in zip(self._parts, self._norms, strict=False):
            x = _run(part, values)
            normalised = module(torch.from_numpy(x).float().reshape(*x.shape, *[1] * (4 - x.ndim)))
            values[norm.output] = normalised.reshape(x.shape).numpy().astype(x.dtype)
        return [_run(self._parts[-1], values)]


def _part(proto: ModelProto, known: Mapping[str, int], target: str, kind: int) -> Any:
    """Return a session that computes a tensor from others, whose types are known."""
    needed, nodes = {target}, list[NodeProto]()
    for node in reversed(proto.graph.node):
        if needed.intersection(node.output) - known.keys():
            nodes.insert(0, node)
            needed |= {name for each in messages(node) if isinstance(each, NodeProto) for name in each.input}
    graph = GraphProto(name="part", node=nodes)
    graph.initializer.extend(each for each in proto.graph.initializer if each.name in needed)
    info = helper.make_tensor_value_info
    graph.input.extend(info(name, known[name], None) for name in known.keys() & needed)
    graph.output.append(info(target, kind, None))
    part = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    part.graph.CopyFrom(graph)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(part.SerializeToString(), options, providers=_PROVIDERS)


def _run(part: Any, values: Mapping[str, np.ndarray]) -> np.ndarray:
    (result,) = part.run(None, {each.name: values[each.name] for each in part.get_inputs()})
    return np.asarray(result)
