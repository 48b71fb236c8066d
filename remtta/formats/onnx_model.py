"""A classifier in an ONNX file, which ONNX Runtime runs: forward passes only.

It has the interface of a timm model, so that everything that needs no layers treats it as one.
"""

from __future__ import annotations

import json
import logging
from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor, nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.errors import CheckpointError, ModelError, RemttaError, UsageError, first_line, needed
from remtta.files import write_atomically
from remtta.formats.loaders import OnnxOptions
from remtta.formats.onnx_graph import OnnxGraph, import_onnx, read_graph
from remtta.models.info import built_from, checked_labels, given_preprocessing, known_labels, read_labels
from remtta.models.metadata import PretrainedConfig, Size
from remtta.models.preprocessing import Preprocessing
from remtta.models.unwrapping import UnwrappedModel, classifiers_of
from remtta.options import ModelOptions

_TYPES = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(double)": "f8"}
_PROVIDERS = {"cpu": "CPU", "cuda": "CUDA", "mps": "CoreML"}
_CPU = "CPUExecutionProvider"
_SIDE = 224  # of images, if a file accepts any size
_AT_ONCE = 4  # images per call on a CPU: more need more memory, and are no faster
_LEAST = {2: 6e-8, 4: 1e-30, 8: 1e-30}  # smallest probability, by the bytes of its type
_LEAST_QUANTISED = 1 / 512  # half a step of 8 bits
_FINE, _COARSE = 1e-4, 2e-2  # largest difference of a probability in a written file: float32; float16 or int8

_log = logging.getLogger(__name__)


class OnnxClassifier(nn.Module):
    """The classifier in an ONNX file. It can be copied and pickled; copies open the file again.

    Its `head` holds the bias (C,) that is added to the logits: 0 in the source model; in a delta, minus the offset.

    Args:
        graph: The parsed file.
        output: Name of the output to use; None for the only one of shape (B, C).
        providers: Execution providers for onnxruntime, by preference.
        size: Height and width of images, if the file accepts any.
    """

    onnx_sha256: Tensor

    def __init__(self, graph: OnnxGraph, output: str | None, providers: Sequence[Any], size: Size | None) -> None:
        super().__init__()
        self.path, self.patch_size, self._providers = graph.path, graph.patch_size, list(providers)
        self._session, self._features = self._open(str(self.path)), ""
        self.provider = str(self._session.get_providers()[0])
        self._find_input(size)
        self._find_output(graph, output)
        self.head = nn.ParameterDict({"bias": torch.zeros(self.num_classes)})
        digest = bytearray(graph.sha256 + self._output.encode())
        self.register_buffer("onnx_sha256", torch.frombuffer(digest, dtype=torch.uint8).clone())
        self.pretrained_cfg = self.default_cfg = PretrainedConfig()

    def get_classifier(self) -> nn.Module:
        """Return the head, as timm's models do."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of preprocessed images (B, 3, H, W)."""
        return self._logits(*self._run(images, [self._output]))

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, C), and the features (B, D) that enter the last linear layer."""
        if not self._features:
            graph = read_graph(self.path, whole=True)
            self._features = graph.features(self._output)
            if self._features not in {each.name for each in graph.proto.graph.output}:
                graph.proto.graph.output.append(import_onnx().ValueInfoProto(name=self._features))
            content, self._session = graph.content({}), None
            del graph  # so that only the new session holds the weights
            self._session = self._open(content)
        logits, features = self._run(images, [self._output, self._features])
        return self._logits(logits), features.flatten(1)

    def _logits(self, returned: Tensor) -> Tensor:
        logits = returned.flatten(1)
        if self._least is not None:
            logits = logits.clamp(min=self._least).log()
            logits = logits - logits.mean(1, keepdim=True)  # a constant per image says nothing
        return logits.to(self.head["bias"].device) + self.head["bias"]

    def _run(self, images: Tensor, outputs: Sequence[str]) -> list[Tensor]:
        """Return outputs in float32 for images (B, 3, H, W), as many at a time as the file takes."""
        images = images.permute(0, 2, 3, 1) if self._channels_last else images
        pixels = images.detach().cpu().numpy().astype(self._type)
        parts = []
        size = self._batch or (_AT_ONCE if self.provider == _CPU else len(pixels))
        for start in range(0, len(pixels), size):
            part = pixels[start : start + size]
            whole = part[np.arange(self._batch or len(part)) % len(part)]  # with copies, if there are too few
            try:
                returned = self._opened.run(outputs, {self._input: whole})
            except Exception as error:  # its own exceptions, which onnxruntime does not expose
                reason = first_line(error)[:200]
                raise CheckpointError(f"onnxruntime cannot run {self.path} on {whole.shape}: {reason}") from error
            parts.append([torch.from_numpy(array[: len(part)]).float() for array in returned])
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    @property
    def _opened(self) -> Any:
        """The session; in a copy, it is opened again."""
        if self._session is None:
            if read_graph(self.path).sha256 != bytes(self.onnx_sha256[:32].tolist()):
                raise CheckpointError(f"{self.path} is no longer the file that was loaded")
            self._session = self._open(str(self.path))
        return self._session

    def _open(self, model: str | bytes) -> Any:
        runtime = needed("onnxruntime", "onnx", "an ONNX file")
        options = runtime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # frames are decoded meanwhile
        try:
            return runtime.InferenceSession(model, options, providers=self._providers)
        except Exception as error:
            raise CheckpointError(f"onnxruntime cannot load {self.path}: {first_line(error)[:200]}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_features": ""}

    # What the file takes and returns.

    def _find_input(self, size: Size | None) -> None:
        inputs = self._opened.get_inputs()
        kind, shape = (inputs[0].type, inputs[0].shape) if inputs else ("", [])
        if len(inputs) != 1 or kind not in _TYPES or len(shape) != 4 or 3 not in (shape[1], shape[3]):
            got = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
            raise CheckpointError(f"{self.path} takes {got or 'nothing'}, not images (B, 3, H, W) or (B, H, W, 3)")
        self._input, self._type, self._channels_last = inputs[0].name, _TYPES[kind], shape[1] != 3
        self._batch = shape[0] if isinstance(shape[0], int) else None
        height, width = shape[1:3] if self._channels_last else shape[2:]
        self.input_size = (height, width) if isinstance(height, int) and isinstance(width, int) else None
        if size is not None and self.input_size not in (None, size):
            raise UsageError(f"{self.path.name} takes images of {height} x {width} only; leave --input-size out")
        self.image_size = self.input_size or size or (_SIDE, _SIDE)

    def _find_output(self, graph: OnnxGraph, wanted: str | None) -> None:
        """Find the output (B, C) by its values for two images, and whether it has logits or probabilities."""
        kinds = {each.name: each.type for each in self._opened.get_outputs()}
        if wanted is not None and wanted not in kinds:
            raise UsageError(f"{self.path.name} has no output {wanted}; choose {', '.join(kinds)}")
        names = [name for name, kind in kinds.items() if kind in _TYPES and wanted in (name, None)]
        images = torch.linspace(-1, 1, 6 * self.image_size[0] * self.image_size[1]).view(2, 3, *self.image_size)
        returned = dict(zip(names, self._run(images, names), strict=True)) if names else {}
        found = {
            name: values
            for name, values in returned.items()
            if values.ndim > 1 and values.shape[:2].numel() == values.numel() and len(values) == 2 < 2 * values.shape[1]
        }
        if not found:
            got = ", ".join(
                f"{name} {tuple(returned[name].shape) if name in returned else kinds[name]}" for name in kinds
            )
            raise CheckpointError(f"{self.path} has no output (B, C), as a classifier has; for two images: {got}")
        if len(found) > 1:
            raise UsageError(
                f"{self.path.name} has several outputs (B, C); choose with --output-name: {', '.join(found)}"
            )
        ((self._output, values),) = found.items()
        self.num_classes = values.shape[1]
        operator, _, quantised = graph.last_operator(self._output)
        if operator == "Sigmoid":
            raise CheckpointError(f"{self.path} ends in a sigmoid: its classes do not exclude one another")
        num_bytes, sums = int(_TYPES[kinds[self._output]][1]), values.flatten(1).sum(1)
        self._least, self._tolerance = None, _COARSE if quantised or num_bytes == 2 else _FINE
        if operator == "Softmax" or (values.min() >= 0 and torch.allclose(sums, torch.ones(2), atol=1e-3)):
            self._least = _LEAST_QUANTISED if quantised else _LEAST[num_bytes]

    @property
    def returns_probabilities(self) -> bool:
        """True if the file returns probabilities, whose logarithms are the logits."""
        return self._least is not None

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write a file whose logits are this model's, with its bias, atomically, and with more metadata.

        Raise UsageError if it would be too large; RemttaError if onnxruntime does not predict the same with it;
        OutputError if it cannot be written.
        """
        graph = read_graph(self.path, whole=True)
        graph.shift(self._output, self.head["bias"].detach().cpu().numpy(), probabilities=self._least is not None)
        content = graph.content(metadata)
        write_atomically(path, lambda temporary: self._write_checked(temporary, content))

    @torch.inference_mode()
    def _write_checked(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        images = torch.randn(2, 3, *self.image_size, generator=torch.Generator().manual_seed(0))
        written = OnnxClassifier(read_graph(path), self._output, self._providers, self.image_size)
        difference = float((written(images).softmax(-1) - self(images).softmax(-1)).abs().max())
        if not difference <= self._tolerance:
            raise RemttaError(f"the shifted file predicts otherwise, by {difference:.1e}; nothing was written")


class OnnxBackbone(AnyClassifier):
    """A classifier in an ONNX file: forward passes only."""

    def __init__(self, module: OnnxClassifier) -> None:
        super().__init__(UnwrappedModel(module, module))
        self._file = module

    @property
    def forward_only(self) -> str:
        return f"{self._file.path.name} is an ONNX file"

    @property
    def _structure(self) -> Never:
        raise ModelError(f"the layers of an ONNX file such as {self._file.path.name} cannot be reached")

    @property
    def patch_size(self) -> Size:
        return self._file.patch_size

    @property
    def input_size(self) -> Size | None:
        return self._file.input_size

    @property
    def classifiers(self) -> Mapping[str, nn.Module]:
        return classifiers_of(self.module)

    def forward(self, images: Tensor) -> Tensor:
        return self.module(images)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self._file.classify_with_features(images)


FAMILIES = {OnnxClassifier: OnnxBackbone}


def load_onnx(options: ModelOptions, own: OnnxOptions, device: str | torch.device) -> OnnxClassifier:
    """Load the classifier in an ONNX file. Raise UsageError if a package is missing, or a value does not fit;
    CheckpointError if the file is damaged, or holds no classifier of images.
    """
    labels, providers = read_labels(options.labels), _providers(str(device), own.provider)
    graph = read_graph(Path(str(options.checkpoint)))
    config = _known_config(graph)
    size = options.input_size or config.get("input_size", ())[1:] or None
    model = OnnxClassifier(graph, own.output_name, providers, size)
    if model.returns_probabilities:
        _log.info("%s returns probabilities; their logarithms are the logits", model.path.name)
    if model.provider != providers[0][0]:
        raise UsageError(f"onnxruntime cannot use {providers[0][0]} on this machine; use --provider cpu")
    config |= given_preprocessing(options) | {"input_size": (3, *model.image_size)}
    named = None if labels is None else checked_labels(labels, model.num_classes)
    config["label_names"] = named or known_labels(model.num_classes, config)
    config["built_from"] = built_from(options) | ({"output_name": own.output_name} if own.output_name else {})
    model.pretrained_cfg = model.default_cfg = config
    return model.eval()


def _providers(device: str, name: str | None) -> list[Any]:
    """Return the execution providers to try, by preference; raise UsageError if one is not available."""
    available = needed("onnxruntime", "onnx", "an ONNX file").get_available_providers()
    short = {each.removesuffix("ExecutionProvider").lower(): each for each in available}
    kind, _, number = device.partition(":")
    wanted = name or ("CUDA" if kind == "auto" and "cuda" in short else _PROVIDERS.get(kind, "CPU"))
    found = short.get(wanted.lower().removesuffix("executionprovider"))
    if found is None:
        raise UsageError(f"onnxruntime has no provider {wanted} here; it has {', '.join(sorted(short))}")
    first = (found, {"device_id": number} if number else {})
    return [first] if found == _CPU else [first, _CPU]


def _known_config(graph: OnnxGraph) -> PretrainedConfig:
    """Return the preprocessing and labels that the file holds, if remtta or Ultralytics wrote it."""
    known = graph.metadata
    if known.get("task", "classify") != "classify":
        raise CheckpointError(f"{graph.path} is a model to {known['task']}, not a classifier of images")
    try:
        if "remtta_version" in known:
            fields = json.loads(known["preprocessing"])
            values = vars(Preprocessing(**{**fields, "input_size": tuple(fields["input_size"])}))
            return {**values, "label_names": json.loads(known["labels"]), "input_size": (3, *values["input_size"])}
        if "task" in known:  # Ultralytics
            names = {"label_names": dict(literal_eval(known["names"]))}
            return {**names, "mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "bilinear", "crop_pct": 1.0}
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError) as error:
        raise CheckpointError(f"{graph.path} has damaged metadata: {first_line(error)}") from error
    return {}
