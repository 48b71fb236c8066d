"""Build the nodes of an ONNX graph from expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper


class Nodes:
    """Nodes and constants under construction; calling it adds a node.

    Attributes:
        nodes: In the order of execution.
        constants: What they read.
        shapes: Of their results, as far as known.
    """

    def __init__(self, prefix: str = "adaptive/") -> None:
        self._prefix = prefix
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.shapes: list[ValueInfoProto] = []
        self._count = 0

    def __call__(self, operator: str, *inputs: Operand, name: str | None = None, **attributes: Any) -> Value:
        """Add a node; return its output, which may be given a name.

        Args:
            inputs: Values, or constants: whole numbers in int64, others in float32.
        """
        output, names = self._new(name), [self.value(each).name for each in inputs]
        self.nodes.append(helper.make_node(operator, names, [output.name], **attributes))
        return output

    def split(self, whole: Value, sizes: Sequence[int]) -> list[Value]:
        """Split a vector into vectors of these sizes."""
        parts = [self._new() for _ in sizes]
        inputs = [whole.name, self.value(sizes).name]
        self.nodes.append(helper.make_node("Split", inputs, [part.name for part in parts], axis=0))
        return parts

    def sum(self, values: Value, *axes: int, keepdims: bool = False) -> Value:
        """Add values up along axes."""
        return self("ReduceSum", values, axes, keepdims=int(keepdims))

    def value(self, given: Operand) -> Value:
        """Return a value, or a constant as one."""
        if isinstance(given, Value):
            return given
        array, constant = np.asarray(given), self._new()
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        self.constants.append(numpy_helper.from_array(array, constant.name))
        return constant

    def _new(self, name: str | None = None) -> Value:
        self._count += 1
        return Value(self, name or f"{self._prefix}{self._count}")


class Value:
    """A tensor in a graph, with arithmetic."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self._nodes, self.name = nodes, name

    def __add__(self, other: Operand) -> Value:
        return self._nodes("Add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self._nodes("Sub", self, other)

    def __rsub__(self, other: float) -> Value:
        return self._nodes("Sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return self._nodes("Mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self._nodes("Div", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return self._nodes("Div", other, self)

    def __matmul__(self, other: Value) -> Value:
        return self._nodes("MatMul", self, other)


Operand = Value | np.ndarray | np.integer | float | Sequence[int] | Sequence[float]
