"""The graph of an ONNX file: its end, its features, and a shift of its logits. `onnx` is imported when it is used."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from remtta.errors import CheckpointError, UsageError, first_line, needed

_MAX_BYTES = 2**31 - 1  # of a protobuf message
_SAME_VALUES = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
_QUANTISED = ("QuantizeLinear", "DequantizeLinear")
_LINEAR = ("Gemm", "MatMul", "Conv", "Einsum")  # in the names of linear layers, fused or quantised ones, too
_SELECTING = {"TopK", "ArgMax", "ArgMin", "NonMaxSuppression"}
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
        return _texts(self.proto.metadata_props)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width in pixels of a transformer's patches, by its first convolution; else those of a CNN."""
        first = next((node for node in self.proto.graph.node if node.op_type == "Conv"), None)
        sizes = {} if first is None else {each.name: tuple(each.ints) for each in first.attribute}
        stride = sizes.get("strides", ())
        is_patch = len(stride) == 2 and stride == sizes.get("kernel_shape") and min(stride) >= _LEAST_PATCH
        return (stride[0], stride[1]) if is_patch else (_CONV_PATCH, _CONV_PATCH)

    @property
    def rounds(self) -> bool:
        """True if values are quantised."""
        operators = [getattr(each, "op_type", "") for each in messages(self.proto.graph)]
        return any("Quantize" in operator or "QLinear" in operator for operator in operators)

    def last_operator(self, output: str) -> tuple[str, str, bool]:
        """Return the operator whose values are an output's, its first input, and whether they are quantised."""
        name, passed = output, [""]
        while (node := self._nodes.get(name)) is not None:
            passed.append(node.op_type)
            name = node.input[0]
            if node.op_type not in (*_SAME_VALUES, *_QUANTISED, "Cast"):
                break
        return passed[-1], name, not set(_QUANTISED).isdisjoint(passed)

    def reads(self, output: str, input: str) -> bool:
        """Return whether an output's values depend on those of an input, not only on its shape."""
        return input in self._walk(output, lambda operator: operator in ("Shape", "Size"))[0]

    def selections(self, output: str) -> list[str]:
        """Return the operators behind the last linear layers that select from their results for an output."""
        return sorted(self._walk(output, lambda operator: any(name in operator for name in _LINEAR))[1] & _SELECTING)

    def _walk(self, output: str, ends: Callable[[str], bool]) -> tuple[set[str], set[str]]:
        """Return the tensors and the operators that an output is computed from, back to where `ends` is true."""
        tensors, operators, waiting = set[str](), set[str](), [output]
        while waiting:
            tensors.add(name := waiting.pop())
            node = self._nodes.get(name)
            if node is None or ends(node.op_type):
                continue
            nodes = [each for each in messages(node) if hasattr(each, "op_type")]  # with those of its subgraphs
            operators.update(each.op_type for each in nodes)
            waiting += {name for each in nodes for name in each.input} - tensors
        return tensors, operators

    def features(self, output: str) -> str:
        """Return the tensor that enters the last linear layer; raise CheckpointError if there is none."""
        name = output
        while (node := self._nodes.get(name)) is not None and node.op_type not in ("Gemm", "MatMul", "Conv"):
            name = next((each for each in node.input if each in self._nodes), "")
        if node is None:
            raise CheckpointError(f"no linear layer makes the logits of {self.path.name}, so it has no features")
        return str(node.input[0])

    def shift(self, output: str, shift: np.ndarray, *, least: float | None) -> None:
        """Add a shift to the logits, in place: to the last bias if there is one, or else after them.

        Its dtype and number of axes are the output's, all of size 1 but for the classes. If the output has
        probabilities p, `least` is the smallest, and they become softmax(log max(p, least) + shift). Call it once.
        """
        helper, graph = import_onnx().helper, self.proto.graph
        operator, before, _ = self.last_operator(output)
        if self._shift_bias(before if operator == "Softmax" else output, shift):
            return
        names = ("raw", "shift", "least", "clamped", "log", "shifted")
        raw, constant, smallest, clamped, log, shifted = (f"{output}_{name}" for name in names)
        for node in graph.node:  # all its readers get what was there before
            for tensors in (node.input, node.output):
                tensors[:] = [raw if name == output else name for name in tensors]
        from_array = import_onnx().numpy_helper.from_array
        graph.initializer.append(from_array(shift, constant))
        if least is None:
            graph.node.append(helper.make_node("Add", [raw, constant], [output]))
            return
        graph.initializer.append(from_array(np.full_like(shift, least), smallest))
        graph.node.append(helper.make_node("Max", [raw, smallest], [clamped]))
        graph.node.append(helper.make_node("Log", [clamped], [log]))
        graph.node.append(helper.make_node("Add", [log, constant], [shifted]))
        graph.node.append(helper.make_node("Softmax", [shifted], [output], axis=1))

    def _shift_bias(self, logits: str, shift: np.ndarray) -> bool:
        """Add a shift to the bias of the layer that returns the logits; return False if it has none of its own."""
        node = self._nodes.get(logits)
        while node is not None and node.op_type in _SAME_VALUES and self._uses[node.output[0]] == 1:
            node = self._nodes.get(node.input[0])
        if node is None or node.op_type not in ("Gemm", "Conv", "Add") or self._uses[node.output[0]] > 1:
            return False
        if any(each.name == "beta" and each.f != 1 for each in node.attribute):  # the factor of a Gemm's bias
            return False
        names = node.input if node.op_type == "Add" else node.input[2:]
        for tensor in self.proto.graph.initializer:
            if tensor.name in names and self._uses[tensor.name] == 1 and np.prod(tensor.dims) == shift.size:
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

    Raise CheckpointError if it is damaged, or refers to a file that is neither in its own folder nor, if it is a link,
    in that of the file it leads to, as in the cache of Hugging Face.
    """
    onnx = import_onnx()
    try:
        proto = onnx.load_model_from_string(content := path.read_bytes())
    except Exception as error:  # protobuf's, which depend on its implementation
        text = f"{path} is not a readable ONNX file; export or copy it again"
        raise CheckpointError(f"{text} ({first_line(error)})") from error
    digest = hashlib.sha256(content)
    outside = [each for each in messages(proto) if getattr(each, "data_location", None) == onnx.TensorProto.EXTERNAL]
    stored = [_texts(tensor.external_data) for tensor in outside]
    files = {place: _weights_file(path, place) for place in sorted({each.get("location", "") for each in stored})}
    for file in files.values():
        with open(file, "rb") as values:
            digest.update(hashlib.file_digest(values, "sha256").digest())
    if whole:
        for tensor, entries in zip(outside, stored, strict=True):  # onnx would follow no link
            with open(files[entries["location"]], "rb") as values:
                values.seek(int(entries.get("offset", 0)))
                tensor.raw_data = values.read(int(entries.get("length", -1)))
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
    else:  # without the weights, which the session reads by itself
        graph = onnx.GraphProto(node=proto.graph.node, output=proto.graph.output)
        proto = onnx.ModelProto(metadata_props=proto.metadata_props, graph=graph)
    return OnnxGraph(proto, path, digest.digest())


def _weights_file(path: Path, place: str) -> Path:
    """Return the file that a model refers to by a path relative to its own; raise CheckpointError as `read_graph`."""
    own, shown = path.parent.resolve(), repr(place[:80])
    try:
        file = (own / place).resolve()
        is_file = file.is_file()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} refers to {shown}, which is not the name of a file; export it again") from error
    folders = own, path.resolve().parent
    if Path(place).is_absolute() or not any(file.is_relative_to(folder) for folder in folders):
        raise CheckpointError(f"{path} refers to {shown}, which is not in its own folder; it was not opened")
    if not is_file:
        raise CheckpointError(f"{path} has its weights in {shown}, which is missing; copy it beside the file")
    return file


def _texts(entries: Any) -> dict[str, str]:
    """Return keys and values of ONNX's entries; protobuf gives those that are not UTF-8 as bytes."""
    return {_text(entry.key): _text(entry.value) for entry in entries}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all in it: tensors may be in subgraphs, functions and attributes."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from messages(part)
