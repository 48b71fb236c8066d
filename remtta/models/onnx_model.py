"""A classifier in an ONNX file, which ONNX Runtime runs: forward passes only.

It has the interface of a timm model, so that everything that needs no layers treats it as one.
"""

from __future__ import annotations

import json
import logging
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remtta.errors import CheckpointError, RemttaError, UsageError, first_line, needed
from remtta.files import write_atomically
from remtta.models.card import built_from, checked_labels, given_preprocessing, known_labels, read_labels
from remtta.models.metadata import PretrainedConfig, Size
from remtta.models.onnx_graph import OnnxGraph, read_graph
from remtta.models.preprocessing import Preprocessing, check_preprocessing
from remtta.options import ModelOptions

_TYPES = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(double)": "f8", "tensor(uint8)": "u1"}
_PROVIDERS = {"cpu": "CPU", "cuda": "CUDA", "mps": "CoreML"}
_SIDE = 224  # of images, if a file accepts any size
_AT_ONCE = 16  # images per call: more need more memory, and are hardly faster
_LEAST = {2: 6e-8, 4: 1e-30, 8: 1e-30}  # smallest probability, by the bytes of its type
_LEAST_QUANTISED = 1 / 512  # half a step of 8 bits
_FINE, _COARSE = 1e-4, 2e-2  # largest difference of a probability in a written file: float32; float16 or int8
_UNUSED = ("use_ema", "num_classes", "model_kwargs", "prompts", "text_embeddings")

_log = logging.getLogger(__name__)


class LogitBias(nn.Module):
    """Adds a bias (C,) to the logits: 0 in the source model; in a delta, the offset that centring subtracts."""

    def __init__(self, num_classes: int, numbers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.bias, self._numbers = nn.Parameter(torch.zeros(num_classes)), numbers

    def forward(self, logits: Tensor) -> Tensor:
        """Return shifted logits (B, C), only of the classes that it is restricted to."""
        return (logits if self._numbers is None else logits[:, self._numbers]) + self.bias

    def restricted(self, numbers: Sequence[int]) -> LogitBias:
        """Return the same for some of the classes, in this order."""
        return LogitBias(len(numbers), list(numbers))


class OnnxClassifier(nn.Module):
    """The classifier in an ONNX file. It can be copied and pickled; copies open the file again.

    Attributes:
        path: The file.
        provider: The execution provider in force.
        patch_size: Height and width of patches in pixels.
        input_size: Height and width of images; None for any.
        num_classes: Number of classes C.
        pretrained_cfg: Preprocessing, labels and origin, as in timm.
        head: The bias that is added to the logits.

    Args:
        graph: The parsed file.
        output: Name of the output to use; None for the only one of shape (B, C).
        providers: Execution providers for onnxruntime, by preference.
        size: Height and width of images, if the file accepts any.
    """

    onnx_sha256: Tensor

    def __init__(self, graph: OnnxGraph, output: str | None, providers: Sequence[Any], size: Size | None) -> None:
        super().__init__()
        self.path, self._providers, self.patch_size = graph.path, list(providers), graph.patch_size
        self._session, self._features = self._open(str(self.path)), ""
        self.provider = str(self._session.get_providers()[0])
        self._find_input(size)
        shown = self._find_output(output)
        self.num_classes = shown.shape[1]
        self._find_logits(graph, shown)
        self.head = LogitBias(self.num_classes)
        digest = bytearray(graph.sha256 + self._output.encode())
        self.register_buffer("onnx_sha256", torch.frombuffer(digest, dtype=torch.uint8).clone())
        self.pretrained_cfg = self.default_cfg = PretrainedConfig()

    def get_classifier(self) -> nn.Module:
        """Return the head, as timm's models do."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of preprocessed images (B, 3, H, W)."""
        return self._logits(self._run(images, [self._output])[0], images.device)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, C), and the features (B, D) that enter the last linear layer."""
        if not self._features:
            graph, onnx = read_graph(self.path, whole=True), needed("onnx", "onnx", "an ONNX file")
            self._features = graph.features(self._output)
            if self._features not in {each.name for each in graph.proto.graph.output}:
                graph.proto.graph.output.append(onnx.ValueInfoProto(name=self._features))
            self._session = self._open(graph.content({}))
        logits, features = self._run(images, [self._output, self._features])
        return self._logits(logits, images.device), torch.from_numpy(features).to(images.device).float().flatten(1)

    def _logits(self, returned: np.ndarray, device: torch.device) -> Tensor:
        logits = torch.from_numpy(returned).flatten(1).to(device).float()
        if self._least is not None:
            logits = logits.clamp(min=self._least).log()
            logits = logits - logits.mean(1, keepdim=True)  # a constant per image says nothing
        return self.head(logits)

    def _run(self, images: Tensor, outputs: Sequence[str]) -> list[np.ndarray]:
        """Return outputs for images (B, 3, H, W), as many at a time as the file takes."""
        pixels = images.detach().cpu().numpy()
        if self._type == "u1":
            pixels = np.rint(255 * pixels).clip(0, 255)
        pixels = (pixels.transpose(0, 2, 3, 1) if self._channels_last else pixels).astype(self._type)
        size, parts = self._batch or _AT_ONCE, []
        for start in range(0, len(pixels), size):
            part = pixels[start : start + size]
            count, missing = len(part), (self._batch or len(part)) - len(part)
            whole = np.concatenate([part, np.repeat(part[-1:], missing, 0)]) if missing else part
            try:
                returned = self._opened.run(outputs, {self._input: np.ascontiguousarray(whole)})
            except Exception as error:  # its own exceptions, which onnxruntime does not expose
                shape = " x ".join(map(str, whole.shape))
                reason = first_line(error)[:200]
                raise CheckpointError(f"onnxruntime cannot run {self.path} on images {shape}: {reason}") from error
            parts.append([array[:count] for array in returned])
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    # The session.

    @property
    def _opened(self) -> Any:
        """The session; in a copy, it is opened again."""
        if self._session is None:
            expected = bytes(self.onnx_sha256.tolist())
            if read_graph(self.path).sha256 != expected[:32]:
                raise CheckpointError(f"{self.path} is no longer the file that was loaded")
            self._session = self._open(str(self.path))
        return self._session

    def _open(self, model: str | bytes) -> Any:
        runtime = needed("onnxruntime", "onnx", "an ONNX file")
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            return runtime.InferenceSession(model, options, providers=self._providers)
        except Exception as error:
            raise CheckpointError(f"onnxruntime cannot load {self.path}: {first_line(error)[:200]}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_features": ""}

    # What the file takes and returns.

    def _find_input(self, size: Size | None) -> None:
        inputs = self._opened.get_inputs()
        known = [(each.type, len(each.shape)) for each in inputs]
        if len(inputs) != 1 or known[0][0] not in _TYPES or known[0][1] != 4:
            got = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
            raise CheckpointError(f"{self.path} takes {got or 'nothing'}, not images (B, 3, H, W) or (B, H, W, 3)")
        self._input, self._type, shape = inputs[0].name, _TYPES[inputs[0].type], inputs[0].shape
        self._channels_last = shape[1] != 3 and shape[3] == 3
        batch, *sides = (side if isinstance(side, int) and side > 0 else None for side in shape)
        channels = sides.pop(2 if self._channels_last else 0)
        if channels not in (3, None):
            raise CheckpointError(f"{self.path} takes images {shape}, which are not RGB")
        self._batch, height, width = batch, *sides
        self.input_size = None if None in sides else (height, width)
        if size is not None and self.input_size not in (None, size):
            raise UsageError(f"{self.path.name} takes images of {height} x {width} only; leave --input-size out")
        self._probe_size = self.input_size or size or (height or _SIDE, width or _SIDE)

    def _find_output(self, name: str | None) -> np.ndarray:
        """Find the output (B, C), and return its values for two images."""
        outputs = {each.name: each.type for each in self._opened.get_outputs()}
        if name is not None and name not in outputs:
            raise UsageError(f"{self.path.name} has no output {name}; choose {', '.join(outputs)}")
        numbers = [each for each, kind in outputs.items() if kind in list(_TYPES)[:3] and name in (each, None)]
        images = torch.linspace(-1, 1, 2 * 3 * self._probe_size[0] * self._probe_size[1]).view(2, 3, *self._probe_size)
        try:
            returned = self._run(images, numbers)
        except RemttaError:
            if self._batch is not None:
                raise
            self._batch = 1  # some exporters fix the number of images inside, but not at the input
            returned = self._run(images, numbers)
        found = {
            each: array
            for each, array in zip(numbers, returned, strict=True)
            if array.ndim > 1 and array.shape[0] == 2 and array.shape[1] > 1 and array[0].size == array.shape[1]
        }
        if not found:
            got = ", ".join(f"{each} {array.shape}" for each, array in zip(numbers, returned, strict=True))
            others = ", ".join(f"{each} {kind}" for each, kind in outputs.items() if each not in numbers)
            raise CheckpointError(
                f"{self.path} is no classifier of images: it has no output (B, C), but for two images returns "
                f"{', '.join(filter(None, [got, others]))}"
            )
        if len(found) > 1:
            raise UsageError(
                f"{self.path.name} has several outputs (B, C); choose with --output-name: {', '.join(found)}"
            )
        self._output = next(iter(found))
        return found[self._output]

    def _find_logits(self, graph: OnnxGraph, shown: np.ndarray) -> None:
        """Find out whether the output, with values `shown` for two images, has logits or probabilities."""
        node, quantised, _ = graph.end(self._output)
        if node is not None and node.op_type == "Sigmoid":
            raise CheckpointError(f"{self.path} ends in a sigmoid: its classes do not exclude one another")
        values = shown.reshape(2, -1).astype("f8")
        shares = values.min() >= 0 and bool(np.allclose(values.sum(1), 1, atol=1e-3))
        coarse = quantised or shown.dtype.itemsize == 2
        self._least, self._tolerance = None, _COARSE if coarse else _FINE
        if shares or (node is not None and node.op_type == "Softmax"):
            self._least = _LEAST_QUANTISED if quantised else _LEAST[shown.dtype.itemsize]
            _log.info("%s returns probabilities; their logarithms are the logits", self.path.name)

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write a file whose logits are this model's, with its bias, atomically, and with more metadata.

        Raise UsageError if it would be too large; RemttaError if onnxruntime does not predict the same with it;
        OutputError if it cannot be written.
        """
        graph = read_graph(self.path, whole=True)
        graph.shift(self._output, self.head.bias.detach().cpu().numpy(), probabilities=self._least is not None)
        content = graph.content(metadata)
        write_atomically(path, lambda temporary: self._write_checked(temporary, content))

    @torch.inference_mode()
    def _write_checked(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        images = torch.randn(2, 3, *self._probe_size, generator=torch.Generator().manual_seed(0))
        written = OnnxClassifier(read_graph(path), self._output, self._providers, self._probe_size)
        difference = float((written(images).softmax(-1) - self(images).softmax(-1)).abs().max())
        if not difference <= self._tolerance:
            raise RemttaError(f"the shifted file predicts otherwise, by {difference:.1e}; nothing was written")


def load_onnx(options: ModelOptions, device: str | torch.device) -> OnnxClassifier:
    """Load the classifier in an ONNX file. Raise UsageError if a package is missing, or options do not apply;
    CheckpointError if the file is damaged, or holds no classifier of images.
    """
    if other := [f"--{name.replace('_', '-')}" for name in _UNUSED if getattr(options, name)]:
        raise UsageError(f"{options.name} is a whole model; leave {' and '.join(other)} out")
    check_preprocessing(options.mean, options.std, options.interpolation, options.crop_pct)
    labels, providers = read_labels(options.labels), _providers(str(device), options.provider)
    graph = read_graph(Path(str(options.checkpoint)))
    config = _known_config(graph)
    size = options.input_size or tuple(config.get("input_size", ())[1:]) or None
    model = OnnxClassifier(graph, options.output_name, providers, size)
    if model.provider != providers[0][0]:
        text = f"onnxruntime cannot use {providers[0][0]} here, but {model.provider}"
        if options.provider:
            raise UsageError(text)
        _log.warning("%s", text)
    config |= given_preprocessing(options) | {"input_size": (3, *model._probe_size)}
    if labels is not None:
        config["label_names"] = checked_labels(labels, model.num_classes)
    config["label_names"] = known_labels(model.num_classes, config)
    config["built_from"] = built_from(replace(options, checkpoint=model.path.resolve()))
    model.pretrained_cfg = model.default_cfg = config
    return model.eval()


def _providers(device: str, name: str | None) -> list[Any]:
    """Return the execution providers to try, by preference; raise UsageError if one is not available."""
    available = needed("onnxruntime", "onnx", "an ONNX file").get_available_providers()
    short = {each.removesuffix("ExecutionProvider").lower(): each for each in available}
    kind, _, number = device.partition(":")
    wanted = name or ("cuda" if kind == "auto" and "cuda" in short else _PROVIDERS.get(kind, "cpu"))
    found = short.get(wanted.lower().removesuffix("executionprovider"))
    if found is None:
        option = f"--provider {name}" if name else f"--device {device}"
        raise UsageError(f"{option}: onnxruntime has no {wanted} here; it has {', '.join(sorted(short))}")
    first = (found, {"device_id": number} if number else {})
    return [first] if found == "CPUExecutionProvider" else [first, "CPUExecutionProvider"]


def _known_config(graph: OnnxGraph) -> PretrainedConfig:
    """Return the preprocessing and labels that the file holds, if remtta or Ultralytics wrote it."""
    known = graph.metadata
    try:
        if "preprocessing" in known and "remtta_version" in known:
            fields = {**json.loads(known["preprocessing"])}
            fields["input_size"] = tuple(fields["input_size"])
            values = vars(Preprocessing(**fields))
            names = {"label_names": json.loads(known.get("labels", "[]"))}
            return {**values, **names, "input_size": (3, *values["input_size"])}
        if known.get("task", "classify") != "classify":
            raise CheckpointError(f"{graph.path} is a model to {known['task']}, not a classifier of images")
        if "task" in known and "names" in known:  # Ultralytics
            names = {"label_names": dict(literal_eval(known["names"]))}
            return {**names, "mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "bilinear", "crop_pct": 1.0}
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        raise CheckpointError(f"{graph.path} has damaged metadata: {first_line(error)}") from error
    return {}
