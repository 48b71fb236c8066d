"""Put the adaptation around the graph of a classifier.

    images, state -> [images; shuffled views of some] -> classifier -> centering -> logits, next_state, status

Views are further rows of the batch, so that the weights exist once. If the classifier takes a fixed number of images, a
`Loop` runs it on the images, and again if there are views. If it has batch norms, a second copy of its nodes, on the
images alone, normalises by recent statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
    helper,
    version_converter,
)
from torch.nn import functional as F

from remtta.errors import CheckpointError, first_line
from remtta.formats.adaptive.centering import (
    STATUS,
    State,
    are_finite,
    center,
    due_for_view,
    read_state,
    state_sizes,
)
from remtta.formats.adaptive.norms import DEQUANTISE, NORM, Moments, Norm, RecentStatistics
from remtta.formats.adaptive.operators import Nodes, Value
from remtta.formats.onnx_graph import messages
from remtta.formats.onnx_model import OnnxClassifier
from remtta.methods.pixels import patch_grid, shuffle_patches

OPSET = 17
"""The lowest that a written file has."""

_PREFIX = "classifier/"  # before names in the classifier that would be ambiguous
_COPY = "adapted/"  # before the names of values in the copy that adapts

_ORDERS = 64  # of patches: views in a batch that are shuffled differently, those of 1,024 images


def wrap(proto: ModelProto, of: OnnxClassifier, number: int, norms: Sequence[Norm]) -> ModelProto:
    """Return a model that adapts itself, made of a classifier's; raise CheckpointError if its opset is too old.

    Args:
        number: Tells its states from those of other classifiers: a whole number from 1 to 2**24.
        norms: That normalise by recent statistics, in the order of execution.
    """
    proto = _with_opset(proto)
    graph, op = proto.graph, Nodes()
    result = "logits" if of.least is None else "probabilities"
    renamed = {name: f"{_PREFIX}{name}" for name in ("images", "state", result, "next_state", "status")}
    _rename(graph, renamed, _PREFIX)
    norms = [replace(norm, output=renamed.get(norm.output, norm.output)) for norm in norms]
    entry, end = (renamed.get(name, name) for name in (of.input_name, of.output_name))
    kind = next(each.type.tensor_type.elem_type for each in graph.input if each.name == entry)

    images = Value(op, "images")
    sizes = state_sizes(of.num_classes, sum(len(norm.mean) for norm in norms))
    state = read_state(op, Value(op, "state"), float(number), sizes)
    finite = are_finite(op, op("Cast", images, to=TensorProto.FLOAT), 1, 2, 3)
    due = due_for_view(op, finite, state)
    rows = op("Concat", images, _shuffled(op, op("Gather", images, _filled(op, due, of.batch)), kind, of), axis=0)
    returned = _looped(op, graph, rows, entry, end, of.batch) if of.batch else _spliced(op, graph, rows, entry, end)
    logits = _logits(op, returned, of)
    adapted = _adapted(op, graph, images, finite, state, (entry, end), kind, of, norms) if norms else None
    first = op("Shape", images, end=1)
    views = op("Slice", logits, first, first + op("Shape", due))
    logits = op("Slice", logits, (0,), first)
    centered, next_state, status = center(
        op, state, float(number), logits, (due, views), finite, of.num_classes, adapted
    )
    op(*(("Identity", centered) if of.least is None else ("Softmax", centered)), name=result)
    op("Identity", next_state, name="next_state")
    op("Identity", status, name="status")

    batch, sides = of.batch or "batch", [*of.image_size, 3] if of.channels_last else [3, *of.image_size]
    state_shape, float32 = [sum(sizes.values())], TensorProto.FLOAT
    shapes: dict[str, Sequence[int | str]] = {
        result: [batch, of.num_classes],
        "next_state": state_shape,
        "status": [len(STATUS)],
    }
    info = helper.make_tensor_value_info
    inputs = [info("images", kind, [batch, *sides]), info("state", float32, state_shape)]
    outputs = [info(name, float32, shape) for name, shape in shapes.items()]
    whole = helper.make_graph(
        op.nodes, "adaptive", inputs, outputs, op.constants, None, op.shapes, graph.sparse_initializer
    )
    proto.graph.CopyFrom(whole)
    return proto


def _with_opset(proto: ModelProto) -> ModelProto:
    opset = next(each.version for each in proto.opset_import if each.domain in ("", "ai.onnx"))
    if opset < OPSET:
        try:
            proto = version_converter.convert_version(proto, OPSET)
        except Exception as error:  # onnx's own, of many types
            reason = first_line(error)[:200]
            raise CheckpointError(
                f"opset {opset} cannot be converted to {OPSET}: {reason}; export with {OPSET}"
            ) from error
    proto.ir_version = max(proto.ir_version, 8)  # of opset 17
    return proto


def _rename(graph: GraphProto, renamed: Mapping[str, str], prefix: str) -> None:
    """Rename values in a graph, subgraphs included, and put a prefix before the names of sizes, as rows are others."""
    for message in messages(graph):
        if isinstance(message, NodeProto):
            for names in (message.input, message.output):
                names[:] = [renamed.get(name, name) for name in names]
        elif isinstance(message, ValueInfoProto | TensorProto):
            message.name = renamed.get(message.name, message.name)
        elif isinstance(message, TensorShapeProto.Dimension) and message.dim_param:
            message.dim_param = f"{prefix}{message.dim_param}"


def _shapes(graph: GraphProto, entry: str) -> list[ValueInfoProto]:
    """Return the shapes of a graph's values: runtimes fuse nodes by them, and fused ones round otherwise."""
    return [*(each for each in graph.input if each.name == entry), *graph.value_info]


def _filled(op: Nodes, indices: Value, batch: int | None) -> Value:
    """Append zeros to indices (K,) unless K is 0 or a multiple of the batch that a classifier takes."""
    if batch is None:
        return indices
    missing = op("Mod", batch - op("Shape", indices), (batch,))
    return op("Concat", indices, op("Cast", op("ConstantOfShape", missing), to=TensorProto.INT64), axis=0)


def _logits(op: Nodes, returned: Value, of: OnnxClassifier) -> Value:
    """Return logits (B, C) of what the classifier returns."""
    logits = op("Reshape", op("Cast", returned, to=TensorProto.FLOAT), (-1, of.num_classes))
    if of.least is None:
        return logits
    logits = op("Log", op("Where", op("Less", logits, of.least), of.least, logits))
    return logits - op.sum(logits, 1, keepdims=True) / float(of.num_classes)  # a constant per image says nothing


def _adapted(
    op: Nodes,
    graph: GraphProto,
    images: Value,
    finite: Value,
    state: State,
    ends: tuple[str, str],
    kind: int,
    of: OnnxClassifier,
    norms: Sequence[Norm],
) -> tuple[Value, Moments]:
    """Run a copy of a classifier that normalises by recent statistics; return its logits (B, C) and the statistics."""
    copy = GraphProto(node=graph.node, value_info=_shapes(graph, ends[0]))
    made = {ends[0], *(name for node in graph.node for name in node.output if name)}
    _rename(copy, {name: f"{_COPY}{name}" for name in made}, _COPY)
    zero = np.zeros((), helper.tensor_dtype_to_np_dtype(kind))
    is_finite = op("Reshape", finite, (-1, 1, 1, 1))
    op("Where", is_finite, images, zero, name=f"{_COPY}{ends[0]}")
    earlier = Moments(state["norm_weight"], state["norm_means"], state["norm_variances"])
    recent = RecentStatistics(op, norms, earlier, op("Cast", finite, to=TensorProto.FLOAT))
    normalised = {f"{_COPY}{norm.output}" for norm in norms}
    op.shapes += copy.value_info
    for node in copy.node:
        node.ClearField("name")  # the original's
        node.ClearField("metadata_props")
        output = node.output[0]
        if output not in normalised:
            op.nodes.append(node)
        elif node.op_type == NORM:
            recent.normalise(Value(op, node.input[0]), output)
        else:
            node.output[0] = f"{output}/raw"
            op.nodes.append(node)
            raw = Value(op, node.output[0])
            if node.op_type == DEQUANTISE:  # a copy, since onnxruntime dequantises for each reader
                raw = op("Max", raw)
            recent.normalise(raw, output)
    return _logits(op, Value(op, f"{_COPY}{ends[1]}"), of), recent.after_batch()


def _spliced(op: Nodes, graph: GraphProto, rows: Value, entry: str, end: str) -> Value:
    """Run a classifier on rows."""
    op("Identity", rows, name=entry)
    op.nodes += graph.node
    op.constants += graph.initializer
    op.shapes += _shapes(graph, entry)
    return Value(op, end)


def _looped(op: Nodes, graph: GraphProto, rows: Value, entry: str, end: str, batch: int) -> Value:
    """Run a classifier on each batch of the rows; what it returns has one more dimension in front."""
    inner, info = Nodes("adaptive/loop/"), helper.make_tensor_value_info
    number, condition = (Value(inner, f"adaptive/loop/{name}") for name in ("number", "condition"))
    start = inner("Reshape", number * batch, (1,))
    inner("Slice", rows, start, start + batch, name=entry)
    goes_on = inner("Identity", condition)
    returned = [each for each in graph.output if each.name == end]
    body = helper.make_graph(
        [*inner.nodes, *graph.node],
        "classifier",
        [info(number.name, TensorProto.INT64, []), info(condition.name, TensorProto.BOOL, [])],
        [info(goes_on.name, TensorProto.BOOL, []), *returned],
        inner.constants,
        value_info=_shapes(graph, entry),
    )
    op.constants += graph.initializer
    count = op("Squeeze", op("Div", op("Shape", rows, end=1), (batch,)))
    return op("Loop", count, np.array(True), body=body)


def _shuffled(op: Nodes, images: Value, kind: int, of: OnnxClassifier) -> Value:
    """Return images with their patches shuffled, as `AdaptedModel.shuffle_patches`."""
    grid = patch_grid(of.image_size, of.patch_size)
    codes = torch.arange(grid**2.0).view(1, 1, grid, grid).expand(_ORDERS, -1, -1, -1)
    orders = shuffle_patches(codes, grid, torch.Generator().manual_seed(0)).view(_ORDERS, grid * grid, 1)
    number = op(
        "Mod", op("Range", np.int64(0), op("Squeeze", op("Shape", images, end=1)), np.int64(1)), np.int64(_ORDERS)
    )
    order = op("Gather", orders.long().numpy(), number)

    images = op("Transpose", images, perm=[0, 3, 1, 2]) if of.channels_last else images
    height, width = fitting = tuple(side // grid * grid for side in of.image_size)
    if fitting != tuple(of.image_size):
        images = _resized(op, op("Cast", images, to=TensorProto.FLOAT), of.image_size, fitting)
    patches = op("Reshape", images, (0, 3, grid, height // grid, grid, width // grid))
    patches = op(
        "Reshape", op("Transpose", patches, perm=[0, 2, 4, 1, 3, 5]), (0, grid * grid, 3 * height * width // grid**2)
    )
    patches = op(
        "Reshape", op("GatherND", patches, order, batch_dims=1), (0, grid, grid, 3, height // grid, width // grid)
    )
    views = op("Reshape", op("Transpose", patches, perm=[0, 3, 1, 4, 2, 5]), (0, 3, height, width))
    if fitting != tuple(of.image_size):
        views = _resized(op, views, fitting, of.image_size)
        views = op("Clip", op("Round", views), 0.0, 255.0) if kind == TensorProto.UINT8 else views
        views = op("Cast", views, to=kind)
    return op("Transpose", views, perm=[0, 2, 3, 1]) if of.channels_last else views


def _resized(op: Nodes, images: Value, old: Sequence[int], new: Sequence[int]) -> Value:
    """Resize images as `shuffle_patches`, by matrices: antialiasing needs a newer opset."""
    rows, columns = (
        F.interpolate(torch.eye(side)[None, None], (to, side), mode="bilinear", antialias=True)[0, 0].numpy()
        for side, to in zip(old, new, strict=True)
    )
    return op("MatMul", op("MatMul", rows, images), np.ascontiguousarray(columns.T))
