"""The graph of an ONNX file: its end, its features, and a shift of its logits. `onnx` is imported when it is used."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from remtta.errors import CheckpointError, UsageError, first_line, needed

_MAX_BYTES = 2**31 - 1  # of a protobuf message
_SAME_VALUES = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
_QUANTISED = ("QuantizeLinear", "DequantizeLinear")
_CONV_PATCH = 32  # pixels per position of the last feature map, in nearly all convolutional networks
_LEAST_PATCH = 8  # of a transformer's first convolution


def import_onnx() -> Any:
    """Import `onnx`; raise UsageError if it is missing."""
    return needed("onnx", "onnx", "an ONNX file")


@dataclass(frozen=True)
class OnnxGraph:
    """A parsed ONNX file."""

    proto: Any  # ModelProto
    path: Path
    sha256: bytes = b""  # of the file and those that it refers to
    _nodes: dict[str, Any] = field(default_factory=dict)  # by the name of each output
    _uses: Counter[str] = field(default_factory=Counter)  # number of readers of each tensor

    def __post_init__(self) -> None:
        for node in self.proto.graph.node:
            self._nodes.update(dict.fromkeys(node.output, node))
            self._uses.update(node.input)
        self._uses.update(output.name for output in self.proto.graph.output)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that its exporter stored with it."""
        return {entry.key: entry.value for entry in self.proto.metadata_props}

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width in pixels of a transformer's patches, by its first convolution; else those of a CNN."""
        first = next((node for node in self.proto.graph.node if node.op_type == "Conv"), None)
        sizes = {} if first is None else {each.name: tuple(each.ints) for each in first.attribute}
        stride = sizes.get("strides", ())
        is_patch = len(stride) == 2 and stride == sizes.get("kernel_shape") and min(stride) >= _LEAST_PATCH
        return (stride[0], stride[1]) if is_patch else (_CONV_PATCH, _CONV_PATCH)

    def last_operator(self, output: str) -> tuple[str, str, bool]:
        """Return the operator whose values are an output's, its first input, and whether they are quantised."""
        name, passed = output, [""]
        while (node := self._nodes.get(name)) is not None:
            passed.append(node.op_type)
            name = node.input[0]
            if node.op_type not in (*_SAME_VALUES, *_QUANTISED, "Cast"):
                break
        return passed[-1], name, not set(_QUANTISED).isdisjoint(passed)

    def features(self, output: str) -> str:
        """Return the tensor that enters the last linear layer; raise CheckpointError if there is none."""
        name = output
        while (node := self._nodes.get(name)) is not None and node.op_type not in ("Gemm", "MatMul", "Conv"):
            name = next((each for each in node.input if each in self._nodes), "")
        if node is None:
            raise CheckpointError(f"no linear layer makes the logits of {self.path.name}, so it has no features")
        return str(node.input[0])

    def shift(self, output: str, shift: np.ndarray, *, probabilities: bool) -> None:
        """Add a shift (C,) to the logits, in place: to the last bias if there is one, or else after them.

        Probabilities p become softmax(log p + shift). Call it once.
        """
        helper, graph = import_onnx().helper, self.proto.graph
        operator, before, _ = self.last_operator(output)
        if self._shift_bias(before if operator == "Softmax" else output, shift):
            return
        raw, log, shifted, constant = (f"{output}_{name}" for name in ("raw", "log", "shifted", "shift"))
        for node in graph.node:  # all its readers get what was there before
            for names in (node.input, node.output):
                names[:] = [raw if name == output else name for name in names]
        kind = next(each.type.tensor_type for each in graph.output if each.name == output)
        values = shift.reshape(-1, *[1] * (len(kind.shape.dim) - 2))
        values = values.astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        graph.initializer.append(import_onnx().numpy_helper.from_array(values, constant))
        if probabilities:
            graph.node.append(helper.make_node("Log", [raw], [log]))
        added, result = (log, shifted) if probabilities else (raw, output)
        graph.node.append(helper.make_node("Add", [added, constant], [result]))
        if probabilities:
            graph.node.append(helper.make_node("Softmax", [shifted], [output], axis=1))

    def _shift_bias(self, logits: str, shift: np.ndarray) -> bool:
        """Add a shift to the bias of the layer that returns the logits; return False if it has none of its own."""
        node = self._nodes.get(logits)
        while node is not None and node.op_type in _SAME_VALUES and self._uses[node.output[0]] == 1:
            node = self._nodes.get(node.input[0])
        if node is None or node.op_type not in ("Gemm", "Conv", "Add") or self._uses[node.output[0]] > 1:
            return False
        names = node.input if node.op_type == "Add" else node.input[2:]
        for tensor in self.proto.graph.initializer:
            if tensor.name in names and self._uses[tensor.name] == 1 and np.prod(tensor.dims) == len(shift):
                values = import_onnx().numpy_helper.to_array(tensor)
                shifted = (values + shift.reshape(values.shape)).astype(values.dtype)
                tensor.CopyFrom(import_onnx().numpy_helper.from_array(shifted, tensor.name))
                return True
        return False

    def content(self, metadata: Mapping[str, str]) -> bytes:
        """Return the content of a file with this graph and more metadata; raise UsageError if it is too large."""
        import_onnx().helper.set_model_props(self.proto, {**self.metadata, **metadata})
        if self.proto.ByteSize() > _MAX_BYTES:
            raise UsageError(f"{self.path.name} takes more than the 2 GB that one ONNX file holds")
        return bytes(self.proto.SerializeToString())


def read_graph(path: Path, *, whole: bool = False) -> OnnxGraph:
    """Parse an ONNX file, with all its weights if `whole`, else with none.

    Raise CheckpointError if it is damaged, or refers to a file that is not in its own folder.
    """
    onnx, folder = import_onnx(), path.parent.resolve()
    try:
        proto = onnx.load_model_from_string(content := path.read_bytes())
    except Exception as error:  # protobuf's, which depend on its implementation
        raise CheckpointError(f"{path} is not a readable ONNX file: {first_line(error)}") from error
    digest, places = hashlib.sha256(content), set()
    for message in _messages(proto):
        if getattr(message, "data_location", None) == onnx.TensorProto.EXTERNAL:
            places |= {entry.value for entry in message.external_data if entry.key == "location"}
    for place in sorted(places):
        file = (folder / place).resolve()
        if not file.is_relative_to(folder) or Path(place).is_absolute():
            raise CheckpointError(f"{path} refers to {place[:80]}, which is not in its own folder; it was not opened")
        if not file.is_file():
            raise CheckpointError(f"{path} has its weights in {place[:80]}, which is missing; copy it beside the file")
        with open(file, "rb") as values:
            digest.update(hashlib.file_digest(values, "sha256").digest())
    if whole:
        onnx.load_external_data_for_model(proto, str(folder))
    else:  # without the weights, which the session reads by itself
        graph = onnx.GraphProto(node=proto.graph.node, output=proto.graph.output)
        proto = onnx.ModelProto(metadata_props=proto.metadata_props, graph=graph)
    return OnnxGraph(proto, path, digest.digest())


def _messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all in it: tensors may be in subgraphs, functions and attributes."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(part)
