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
_PRODUCTS = ("Gemm", "MatMul", "Conv")
_CONV_PATCH = 32  # pixels per position of the last feature map, in nearly all convolutional networks
_LEAST_PATCH = 8  # of a transformer's first convolution


def import_onnx() -> Any:
    """Import `onnx`; raise UsageError if it is missing."""
    return needed("onnx", "onnx", "an ONNX file")


@dataclass(frozen=True)
class OnnxGraph:
    """A parsed ONNX file."""

    proto: Any  # ModelProto; without the values of tensors stored elsewhere
    path: Path
    sha256: bytes  # of the file and those that it refers to
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
        for node in self.proto.graph.node:
            if node.op_type == "Conv":
                given = {attribute.name: tuple(attribute.ints) for attribute in node.attribute}
                stride = given.get("strides", ())
                if len(stride) == 2 and stride == given.get("kernel_shape") and min(stride) >= _LEAST_PATCH:
                    return stride[0], stride[1]
                break
        return _CONV_PATCH, _CONV_PATCH

    def end(self, output: str) -> tuple[Any, bool, bool]:
        """Return the node whose result an output is up to shape and type, whether it is quantised, and cast."""
        name, ops = output, [""]
        while (node := self._nodes.get(name)) is not None:
            ops.append(node.op_type)
            if node.op_type not in (*_SAME_VALUES, *_QUANTISED, "Cast"):
                break
            name = node.input[0]
        return node, not set(_QUANTISED).isdisjoint(ops), "Cast" in ops

    def features(self, output: str) -> str:
        """Return the tensor that enters the last linear layer; raise CheckpointError if there is none."""
        node, *_ = self.end(output)
        if node is not None and "Softmax" in node.op_type:
            node, *_ = self.end(node.input[0])
        if node is not None and node.op_type == "Add":  # a bias
            products = [self.end(name)[0] for name in node.input]
            node = next((each for each in products if each is not None and each.op_type in _PRODUCTS), node)
        if node is None or node.op_type not in _PRODUCTS:
            raise CheckpointError(f"no linear layer makes the logits of {self.path.name}, so it has no features")
        return str(node.input[0])

    def shift(self, output: str, shift: np.ndarray, *, probabilities: bool) -> None:
        """Add a shift (C,) to the logits, in place: to the last bias if there is one, or else after them.

        Probabilities p become softmax(log p + shift). Call it once.
        """
        onnx, graph = import_onnx(), self.proto.graph
        node, *_ = self.end(output)
        logits = node.input[0] if node is not None and node.op_type == "Softmax" else output
        if self._shift_bias(logits, shift):
            return
        raw, constant = f"{output}_unshifted", f"{output}_shift"
        for node in graph.node:  # all its readers get what was there before
            for names in (node.input, node.output):
                names[:] = [raw if name == output else name for name in names]
        kind = next(each.type.tensor_type for each in graph.output if each.name == output)
        values = shift.reshape(-1, *[1] * (len(kind.shape.dim) - 2))
        values = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        graph.initializer.append(onnx.numpy_helper.from_array(values, constant))
        names = [raw, f"{output}_log", f"{output}_shifted"] if probabilities else [raw, output]
        if probabilities:
            graph.node.append(onnx.helper.make_node("Log", names[:1], names[1:2]))
        graph.node.append(onnx.helper.make_node("Add", [names[-2], constant], names[-1:]))
        if probabilities:
            graph.node.append(onnx.helper.make_node("Softmax", names[-1:], [output], axis=1))

    def _shift_bias(self, logits: str, shift: np.ndarray) -> bool:
        """Add a shift to the bias of the layer that returns the logits; return False if it has none of its own."""
        helper, node = import_onnx().numpy_helper, self._nodes.get(logits)
        while node is not None and node.op_type in _SAME_VALUES and self._uses[node.output[0]] == 1:
            node = self._nodes.get(node.input[0])
        if node is None or node.op_type not in ("Gemm", "Conv", "Add") or self._uses[node.output[0]] > 1:
            return False
        names = node.input if node.op_type == "Add" else node.input[2:]
        for tensor in self.proto.graph.initializer:
            if tensor.name in names and self._uses[tensor.name] == 1 and np.prod(tensor.dims) == len(shift):
                values, beta = helper.to_array(tensor), [each.f for each in node.attribute if each.name == "beta"]
                if values.dtype.kind != "f" or beta not in ([], [1.0]):
                    return False
                shifted = (values + shift.reshape(values.shape)).astype(values.dtype)
                tensor.CopyFrom(helper.from_array(shifted, tensor.name))
                return True
        return False

    def content(self, metadata: Mapping[str, str]) -> bytes:
        """Return the content of a file with this graph and more metadata; raise UsageError if it is too large."""
        import_onnx().helper.set_model_props(self.proto, {**self.metadata, **metadata})
        if self.proto.ByteSize() > _MAX_BYTES:
            raise UsageError(f"{self.path.name} takes more than the 2 GB that one ONNX file holds")
        return bytes(self.proto.SerializeToString())


def read_graph(path: Path, *, whole: bool = False) -> OnnxGraph:
    """Parse an ONNX file, with the values that it stores in other files if `whole`.

    Raise CheckpointError if it is damaged, or refers to a file that is not in its own folder.
    """
    onnx, folder = import_onnx(), path.parent.resolve()
    try:
        content = path.read_bytes()
        proto = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's, which depend on its implementation
        raise CheckpointError(f"{path} is not a readable ONNX file: {first_line(error)}") from error
    external = [each for each in _messages(proto) if getattr(each, "data_location", 0) == onnx.TensorProto.EXTERNAL]
    places = sorted({entry.value for each in external for entry in each.external_data if entry.key == "location"})
    digest = hashlib.sha256(content)
    for place in places:
        if not (file := (folder / place).resolve()).is_relative_to(folder) or Path(place).is_absolute():
            raise CheckpointError(f"{path} refers to {place[:80]}, which is not in its own folder; it was not opened")
        if not file.is_file():
            raise CheckpointError(
                f"{path} stores its weights in {place[:80]}, which is missing; copy it beside {path.name}"
            )
        with open(file, "rb") as values:
            digest.update(hashlib.file_digest(values, "sha256").digest())
    if whole:
        onnx.load_external_data_for_model(proto, str(folder))
    return OnnxGraph(proto, path, digest.digest())


def _messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all in it: tensors may be in subgraphs, functions and attributes."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(part)
