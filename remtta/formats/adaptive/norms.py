"""Batch norms with recent statistics, as `remtta.backbones.batchnorm.BatchStatistics`, as an ONNX graph.

The adapted model is a second copy of the classifier's nodes, which reads the same weights. In files whose batch norms
were folded into convolutions, the outputs of these are normalised: a norm that returns the source's statistics if it
sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from remtta.backbones.batchnorm import HALF_LIFE, PRIOR
from remtta.formats.adaptive.operators import Nodes, Value

_KEEP = 0.5 ** (1 / HALF_LIFE)
_TINY = 1e-9  # bound on divisors
_EPSILON = 1e-5  # of measured norms

NORM = "BatchNormalization"
DEQUANTISE = "DequantizeLinear"


@dataclass(frozen=True)
class Norm:
    """A batch norm.

    Attributes:
        output: Name of what its node returns, or of a convolution's output that is normalised.
        kind: ONNX's number of its input's type.
        scale: Shape (C,), as the others, in float32.
        mean: Of the source images.
        variance: Of the source images.
    """

    output: str
    kind: int
    epsilon: float
    scale: np.ndarray
    shift: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


class Moments(NamedTuple):
    """Mean and variance of channels, shape (C,), and the number of images that they count for."""

    weight: Value
    mean: Value
    variance: Value


def find_norms(graph: GraphProto) -> list[Norm]:
    """Return the batch norms in a graph with constant statistics, in the order of execution."""
    constants = {each.name: each for each in graph.initializer}
    return [
        Norm(
            node.output[0],
            constants[node.input[1]].data_type,
            next((each.f for each in node.attribute if each.name == "epsilon"), 1e-5),
            *(numpy_helper.to_array(constants[name]).astype(np.float32) for name in node.input[1:]),
        )
        for node in graph.node
        if node.op_type == NORM and len(node.output) == 1 and constants.keys() >= {*node.input[1:]}
    ]


def convolutions(graph: GraphProto) -> list[NodeProto]:
    """Return the convolutions into which batch norms may have been folded: with a bias, and not of separate patches.

    If the output of one is quantised, return the node that dequantises it, so that runtimes still run the convolution
    in integers.
    """
    readers, outputs = _readers(graph), set[str]()
    for node in graph.node:
        if node.op_type == "Conv" and len(node.input) == 3 and node.input[2]:
            size = {each.name: each.ints for each in node.attribute}
            if max(size.get("kernel_shape", [1])) == 1 or size.get("strides") != size.get("kernel_shape"):
                outputs.add((_dequantised(node, readers) or node).output[0])
    return [node for node in graph.node if node.output[0] in outputs]  # in the order of execution


def round_again(graph: GraphProto) -> None:
    """Quantise and dequantise quantised outputs of convolutions once more, which returns the same.

    Norms go in between, and runtimes still run the operators that follow in integers.
    """
    makers, again = {node.output[0]: node for node in graph.node}, dict[str, list[NodeProto]]()
    for node in convolutions(graph):
        if node.op_type == DEQUANTISE:
            first, second, output = NodeProto(), NodeProto(), node.output[0]
            first.CopyFrom(makers[node.input[0]])
            second.CopyFrom(node)
            node.output[0] = first.input[0] = f"{output}/first"
            first.output[0] = second.input[0] = f"{output}/again"
            again[node.output[0]] = [first, second]
            for each in again[node.output[0]]:
                each.ClearField("name")
    nodes = [each for node in graph.node for each in (node, *again.get(node.output[0], ()))]
    replaced = GraphProto(node=nodes)  # a copy
    del graph.node[:]
    graph.node.extend(replaced.node)


def add_measurements(graph: GraphProto) -> list[str]:
    """Let a graph also return what `measured_norms` needs of each convolution; return the names of these outputs."""
    op = Nodes("measured/")
    for node in convolutions(graph):
        mean, square, positions = _means(op, op("Cast", Value(op, node.output[0]), to=TensorProto.FLOAT))
        positions = op.sum(mean, 1, keepdims=True) * 0.0 + positions
        op("Concat", mean, square, positions, axis=1, name=f"measured/{node.output[0]}")
    graph.node.extend(op.nodes)
    graph.initializer.extend(op.constants)
    names = [node.output[0] for node in op.nodes if node.op_type == "Concat"]
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return names


def measured_norms(graph: GraphProto, measured: Sequence[np.ndarray]) -> list[Norm]:
    """Return norms that return a convolution's output unchanged where it has the statistics of the source images.

    Args:
        measured: What `add_measurements` returns for the source images, one array (N, 2 C + 1) per convolution.
    """
    norms, constants = [], {each.name: each for each in graph.initializer}
    for node, values in zip(convolutions(graph), measured, strict=True):
        mean, square = np.split(values[:, :-1].mean(0, dtype=np.float64), 2)
        if values[0, -1] > 1:  # not of one position, as after pooling, where no batch norm is common
            variance = np.maximum(square - mean**2, 0)
            weights = constants.get(node.input[1])  # or the step between quantised values
            kind = TensorProto.FLOAT if weights is None else weights.data_type  # they are quantised, or float
            scale, shift, variance = (
                each.astype(np.float32) for each in (np.sqrt(variance + _EPSILON), mean, variance)
            )
            norms.append(Norm(node.output[0], kind, _EPSILON, scale, shift, shift, variance))
    return norms


def _readers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def _dequantised(node: NodeProto, readers: Mapping[str, Sequence[NodeProto]]) -> NodeProto | None:
    """Return the node that dequantises the output of another, if that is all it is for."""
    for expected in ("QuantizeLinear", DEQUANTISE):
        after = readers.get(node.output[0], [])
        if [each.op_type for each in after] != [expected]:
            return None
        (node,) = after
    return node


class RecentStatistics:
    """Statistics of the stream's images, pooled with the source's; the newest images count most.

    Args:
        norms: In the order of execution.
        earlier: The statistics of the images before, of all channels of all norms.
        counted: 1 for images that count, 0 for others, shape (B,).
    """

    def __init__(self, op: Nodes, norms: Sequence[Norm], earlier: Moments, counted: Value) -> None:
        count = op.sum(counted, 0, keepdims=True)
        kept = op("Exp", count * float(np.log(_KEEP)))
        self._op, self._norms, self._before = op, norms, earlier
        self._shares = counted / op("Max", count, 1.0)
        self._weight = (1.0 - kept) / (1 - _KEEP)
        self._aged = earlier._replace(weight=earlier.weight * kept)
        means, variances = (
            np.concatenate(each) for each in zip(*((norm.mean, norm.variance) for norm in norms), strict=True)
        )
        source = Moments(op.value([float(PRIOR)]), op.value(means), op.value(variances))
        prior = _pooled(op, source, self._aged)
        sizes = [len(norm.mean) for norm in norms]
        self._priors = list(zip(*(op.split(each, sizes) for each in prior[1:]), strict=True))
        self._prior_weight, self._batch = prior.weight, list[Moments]()

    def normalise(self, x: Value, output: str) -> None:
        """Normalise the input (B, C, ...) of the next norm by its statistics, this batch's included."""
        op, number = self._op, len(self._batch)
        norm, prior = self._norms[number], self._priors[number]
        is_float = norm.kind == TensorProto.FLOAT
        x = x if is_float else op("Cast", x, to=TensorProto.FLOAT)
        mean, square = (self._shares @ each for each in _means(op, x)[:2])
        batch = Moments(self._weight, mean, op("Max", square - mean * mean, 0.0))
        self._batch.append(batch)
        _, mean, variance = _pooled(op, Moments(self._prior_weight, *prior), batch)
        parameters = norm.scale, norm.shift, mean, variance
        normalised = op(NORM, x, *parameters, epsilon=norm.epsilon, name=output if is_float else None)
        if not is_float:
            op("Cast", normalised, to=norm.kind, name=output)

    def after_batch(self) -> Moments:
        """Return the statistics of the stream after this batch; those before it, if they would not be finite."""
        op = self._op
        batch = (op("Concat", *each, axis=0) for each in zip(*(each[1:] for each in self._batch), strict=True))
        recent = _pooled(op, self._aged, Moments(self._weight, *batch))
        finite = op("Less", op("Abs", op.sum(recent.mean, 0) + op.sum(recent.variance, 0)), 3e38)
        return Moments(*(op("Where", finite, *each) for each in zip(recent, self._before, strict=True)))


def _means(op: Nodes, x: Value) -> tuple[Value, Value, Value]:
    """Return the mean and the mean square of each image's channels (B, C), and the number of positions (1,)."""
    flat = op("Reshape", x, (0, 0, -1))
    positions = op("Cast", op("Shape", flat, start=2), to=TensorProto.FLOAT)
    return op.sum(flat, 2) / positions, op.sum(flat * flat, 2) / positions, positions


def _pooled(op: Nodes, first: Moments, second: Moments) -> Moments:
    """Return mean and variance of the images of both together, as `batchnorm._pooled`."""
    weight = first.weight + second.weight
    share = second.weight / op("Max", weight, _TINY)
    apart = second.mean - first.mean
    mean = first.mean + apart * share
    variance = first.variance + (second.variance - first.variance + apart * apart * (1.0 - share)) * share
    return Moments(weight, mean, variance)
