"""A classifier in an ONNX file, which ONNX Runtime runs: forward passes only.

It has the interface of a timm model, so that everything that needs no layers treats it as one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never, Self

import numpy as np
import torch
from torch import Tensor, nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.errors import CheckpointError, ModelError, RemttaError, UsageError, counted, needed
from remtta.files import write_atomically
from remtta.formats.onnx_graph import OnnxGraph, import_onnx, read_graph
from remtta.models.metadata import PretrainedConfig, Size
from remtta.models.unwrapping import UnwrappedModel, classifiers_of

CPU = "CPUExecutionProvider"
MAX_PIXELS = 2**25
"""Pixels of one call's images, or of two images if a file takes any number; they take 400 MB in float32."""

_FLOATS = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(double)": "f8"}
_PIXELS = "tensor(uint8)"
_AT_ONCE = 4  # images per call on a CPU: more need more memory, and are no faster
_SOFTMAXES, _SIGMOIDS = ("Softmax", "QLinearSoftmax"), ("Sigmoid", "QLinearSigmoid")
_LEAST = {2: 6e-8, 4: 1e-30, 8: 1e-30}  # smallest probability, by the bytes of its type
_LEAST_QUANTISED = 1 / 512  # half a step of 8 bits
_FINE, COARSE = 1e-4, 2e-2  # largest difference of a probability in a written file: float32; float16 or int8


class OnnxClassifier(nn.Module):
    """The classifier in an ONNX file. It can be copied and pickled; copies open the file again.

    Its `head` holds the bias (C,) that is added to the logits: 0 in the source model; in a delta, minus the offset.

    Args:
        graph: The parsed file.
        output: Name of the output to use; None for the only one of shape (B, C).
        providers: Execution providers for onnxruntime, by preference.
        size: Height and width of images, if the file accepts any.
        usual: Height and width where neither the file nor `size` says.

    Attributes:
        input_name: Of the images.
        output_name: Of the logits or probabilities.
        batch: Number of images, if it is fixed.
        channels_last: Whether images are (B, H, W, 3).
        least: Lower bound on probabilities, of which the logarithm is taken; None for logits.
        tolerance: Largest difference of a probability that counts as rounding.
        normalises: Whether the file takes pixels, in uint8, and normalises them itself.
        assumes_size: Whether `usual` is used.
        doubt: How the output differs from logits; "" if it does not.
    """

    onnx_sha256: Tensor
    _others: Mapping[str, np.ndarray] = {}  # inputs beside the images

    def __init__(
        self,
        graph: OnnxGraph,
        output: str | None,
        providers: Sequence[Any],
        size: Size | None,
        usual: Size = (224, 224),
    ) -> None:
        super().__init__()
        self.path, self.patch_size, self._providers = graph.path, graph.patch_size, list(providers)
        self._session, self._features = self.open_session(str(self.path)), ""
        self.provider = str(self._session.get_providers()[0])
        self._find_interface(graph, output, size, usual)
        self.head = nn.ParameterDict({"bias": torch.zeros(self.num_classes)})
        digest = bytearray(graph.sha256 + self.output_name.encode())
        self.register_buffer("onnx_sha256", torch.frombuffer(digest, dtype=torch.uint8).clone())
        self.pretrained_cfg = self.default_cfg = PretrainedConfig()

    def get_classifier(self) -> nn.Module:
        """Return the head, as timm's models do."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of preprocessed images (B, 3, H, W)."""
        return self._logits(*self.run(images, [self.output_name]))

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, C), and the features (B, D) that enter the last linear layer."""
        if not self._features:
            graph = read_graph(self.path, whole=True)
            self._features = graph.features(self.output_name)
            if self._features not in {each.name for each in graph.proto.graph.output}:
                graph.proto.graph.output.append(import_onnx().ValueInfoProto(name=self._features))
            content, self._session = graph.content({}), None
            del graph  # so that only the new session holds the weights
            self._session = self.open_session(content)
        logits, features = self.run(images, [self.output_name, self._features])
        return self._logits(logits), features.flatten(1)

    def _logits(self, returned: Tensor) -> Tensor:
        logits = returned.flatten(1)
        if self.least is not None:
            logits = logits.clamp(min=self.least).log()
            logits = logits - logits.mean(1, keepdim=True)  # a constant per image says nothing
        return logits.to(self.head["bias"].device) + self.head["bias"]

    def run(self, images: Tensor, outputs: Sequence[str]) -> list[Tensor]:
        """Return outputs in float32 for images (B, 3, H, W), as many at a time as the file takes; the logits first."""
        parts = []
        for part in images.split(self.batch or (_AT_ONCE if self.provider == CPU else len(images))):
            returned = self._call(part, outputs)
            count = self.batch or len(part)
            if any(len(array) != count for array in returned) or returned[0].size != count * self.num_classes:
                got = f"{returned[0].shape} for {counted(count, 'image')}"
                raise CheckpointError(f"{self.path} returned {got}, not logits of {self.num_classes} classes")
            parts.append([torch.from_numpy(array[: len(part)]).float() for array in returned])
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def _call(self, images: Tensor, outputs: Sequence[str], **others: np.ndarray) -> list[np.ndarray]:
        """Return outputs as they are, for at most as many images as the file takes; with copies if they are fewer."""
        pixels = self.as_input(images)
        whole = pixels[np.arange(self.batch or len(pixels)) % len(pixels)]
        try:
            return list(self._opened.run(outputs, {self.input_name: whole, **self._others, **others}))
        except Exception as error:  # its own exceptions, which onnxruntime does not expose
            raise CheckpointError(f"onnxruntime cannot run {self.path} on {whole.shape}: {_reason(error)}") from error

    def as_input(self, images: Tensor) -> np.ndarray:
        """Return images (B, 3, H, W) in the form and type that the file takes."""
        pixels = (images.permute(0, 2, 3, 1) if self.channels_last else images).detach().cpu().numpy()
        if self.normalises:
            pixels = np.rint(255 * pixels).clip(0, 255)
        return pixels.astype(self._type, copy=False)

    @property
    def _opened(self) -> Any:
        """The session; in a copy, it is opened again."""
        if self._session is None:
            if read_graph(self.path).sha256 != bytes(self.onnx_sha256[:32].tolist()):
                raise CheckpointError(f"{self.path} is no longer the file that was loaded")
            self._session = self.open_session(str(self.path))
        return self._session

    def open_session(self, model: str | bytes) -> Any:
        """Open a file or its content, with this model's execution providers."""
        runtime = needed("onnxruntime", "onnx", "an ONNX file")
        options = runtime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, torch.get_num_threads()  # 4: errors are raised
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # frames are decoded meanwhile
        try:
            return runtime.InferenceSession(model, options, providers=self._providers)
        except Exception as error:
            raise CheckpointError(f"onnxruntime cannot load {self.path}: {_reason(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_features": ""}

    # What the file takes and returns.

    def _find_interface(self, graph: OnnxGraph, output: str | None, size: Size | None, usual: Size) -> None:
        """Find the input's form by running two images in each that it may have, and the output by its values."""
        try:
            kinds = {each.name: each.type for each in self._opened.get_outputs()}
            forms = self._possible_inputs()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} has inputs or outputs whose names are not UTF-8") from error
        if output is not None and output not in kinds:
            raise UsageError(f"{self.path.name} has no output {output}; choose {', '.join(kinds)}")
        kinds = {name: kind for name, kind in kinds.items() if output in (name, None)}
        problems = []
        for channels_last, sides in forms:
            self.channels_last = channels_last
            self._choose_size(sides, size, usual)
            try:
                returned = self._run_trial([name for name, kind in kinds.items() if kind in _FLOATS])
            except CheckpointError as error:
                problems.append(str(error))
            else:
                return self._find_output(graph, kinds, returned)
        advice = "" if self.input_size else "; if its images have another size, give --input-size"
        raise CheckpointError("; ".join(problems) + advice)

    def _possible_inputs(self) -> list[tuple[bool, list[int | None]]]:
        """Return whether channels are last, and height and width where known, for each form that images may have."""
        inputs = [each for each in self._opened.get_inputs() if each.name not in self._others]
        kind, shape = (inputs[0].type, inputs[0].shape) if len(inputs) == 1 else ("", [])
        sizes = [side if isinstance(side, int) and side > 0 else None for side in shape or [None] * 4]
        forms = [(1, False, sizes[2:]), (3, True, sizes[1:3])] if len(sizes) == 4 else []
        sure = [(last, sides) for axis, last, sides in forms if sizes[axis] == 3]
        possible = sure[:1] or [(last, sides) for axis, last, sides in forms if sizes[axis] is None]
        if not possible or kind not in (*_FLOATS, _PIXELS):
            got = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
            raise CheckpointError(f"{self.path} takes {got or 'nothing'}, not images (B, 3, H, W) or (B, H, W, 3)")
        self.input_name, self._type, self.batch = inputs[0].name, _FLOATS.get(kind, "u1"), sizes[0]
        self.normalises = kind == _PIXELS
        return possible

    def _choose_size(self, sides: Sequence[int | None], size: Size | None, usual: Size) -> None:
        """Choose the size of images: the file's, else `size`, else that of the other side, else `usual`."""
        height, width = sides
        known = height or width
        self.input_size = None if height is None or width is None else (height, width)
        self.assumes_size = not (known or size)
        assumed = size or ((known, known) if known else usual)
        self.image_size = (height or assumed[0], width or assumed[1])
        shown = "{} x {}".format(*self.image_size)
        if size not in (None, self.image_size):
            raise UsageError(f"{self.path.name} takes images of {shown} only; leave --input-size out")
        if (self.batch or 2) * self.image_size[0] * self.image_size[1] > MAX_PIXELS:
            count = "" if self.batch is None else f"{self.batch} "
            text = f"{self.path} takes {count}images of {shown}, and remtta at most {MAX_PIXELS:,} pixels at once"
            raise (UsageError if size else CheckpointError)(text)

    def _run_trial(self, outputs: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return outputs for an image, and for two, or for another one if the file takes one at a time."""
        low, (height, width) = 0 if self.normalises else -1, self.image_size
        images = torch.linspace(low, 1, 6 * height * width).view(2, 3, height, width)
        calls = [self._call(part, outputs) for part in (images[:1], images[1 if self.batch == 1 else 0 :]) if outputs]
        return dict(zip(outputs, zip(*calls, strict=True), strict=True))

    def _find_output(
        self, graph: OnnxGraph, kinds: Mapping[str, str], returned: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Find the only output (B, C), and whether it has logits or probabilities."""
        problems = {
            name: self._problem(graph, name, *returned[name]) if name in returned else f"is {kind}"
            for name, kind in kinds.items()
        }
        found = [name for name, problem in problems.items() if not problem]
        if not found:
            got = "; ".join(f"{name} {problem}" for name, problem in problems.items())
            raise CheckpointError(f"{self.path} has no output (B, C), as a classifier has: {got}")
        if len(found) > 1:
            raise UsageError(
                f"{self.path.name} has several outputs (B, C); choose with --output-name: {', '.join(found)}"
            )
        self.output_name, (first, second) = found[0], returned[found[0]]
        self._kind, self._axes, self.num_classes = first.dtype, first.ndim, first.shape[1]
        operator, _, quantised = graph.last_operator(self.output_name)
        if operator in _SIGMOIDS:
            raise CheckpointError(f"{self.path} ends in a sigmoid: its classes do not exclude one another")
        values = torch.from_numpy(np.stack([first[0], second[0 if self.batch == 1 else 1]])).float().flatten(1)
        sums, is_softmax = values.sum(1), operator in _SOFTMAXES
        add_to_1 = torch.allclose(sums, torch.ones(2), atol=COARSE if is_softmax else 1e-3)
        self.tolerance = COARSE if quantised or first.itemsize == 2 else _FINE
        self.least, self.doubt = None, ""
        if (is_softmax and quantised) or (values.min() >= 0 and add_to_1):
            self.least = _LEAST_QUANTISED if quantised else _LEAST[first.itemsize]
        elif values.min() >= 0 and values.max() <= 1:
            self.doubt = "values in [0, 1], as a sigmoid does"
        elif (
            not torch.equal(*values)
            and torch.allclose(sums[0], sums[1], rtol=self.tolerance / 10)
            and sums.abs().min() > self.tolerance * values.abs().sum(1).max()
        ):
            self.doubt = f"values that sum to {sums[0]:.4g} for each image, as scaled probabilities do"

    def _problem(self, graph: OnnxGraph, name: str, first: np.ndarray, second: np.ndarray) -> str:
        """Return how an output, for an image and for two, shows that it is no (B, C) of a classifier; "" if it is."""
        for count, array in ((self.batch or 1, first), (self.batch or 2, second)):
            if array.ndim < 2 or len(array) != count or not 1 < array.shape[1] == array.size // count:
                return f"is {array.shape} for {counted(count, 'image')}"
        if first.shape[1:] != second.shape[1:]:
            return f"is {first.shape} for one image and {second.shape} for others"
        largest = np.abs(first[np.isfinite(first)]).max(initial=0)
        if not np.allclose(first, first[:1], rtol=0, atol=COARSE * largest, equal_nan=True):
            return f"differs among {len(first)} copies of an image"  # as the rows of (C, B) do
        if operators := graph.selections(name):
            return f"is selected by {' and '.join(operators)}"
        return "" if graph.reads(name, self.input_name) else "does not depend on the images"

    def run_by(self, session: Any) -> Self:
        """Return a copy that another session runs, such as one of a changed graph."""
        model = copy.deepcopy(self)
        model._session = session
        return model

    @property
    def returns_probabilities(self) -> bool:
        """True if the file returns probabilities, whose logarithms are the logits."""
        return self.least is not None

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write a file whose logits are this model's, with its bias, atomically, and with more metadata.

        Raise UsageError if it would be too large; RemttaError if onnxruntime does not predict the same with it;
        OutputError if it cannot be written.
        """
        content = self.shifted_graph().content(metadata)
        write_atomically(path, lambda temporary: self._write_checked(temporary, content))

    def shifted_graph(self) -> OnnxGraph:
        """Return the whole graph, with the bias."""
        graph, shift = read_graph(self.path, whole=True), self.head["bias"].detach().cpu().numpy()
        if shift.any():
            graph.shift(
                self.output_name, shift.astype(self._kind).reshape(-1, *[1] * (self._axes - 2)), least=self.least
            )
        return graph

    @torch.inference_mode()
    def _write_checked(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        images = torch.randn(2, 3, *self.image_size, generator=torch.Generator().manual_seed(0))
        written = OnnxClassifier(read_graph(path), self.output_name, self._providers, self.image_size)
        difference = float((written(images).softmax(-1) - self(images).softmax(-1)).abs().max())
        if not difference <= self.tolerance:
            raise RemttaError(f"the shifted file predicts otherwise, by {difference:.1e}; nothing was written")


_PLACES = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|"
    r"\S+\.(?:cc|h):\d+ (?:(?:[\w:<>&*]+ )*[\w<>]+(?:::[\w~<>]+)+\([^()]*\)(?: const)? )?"
)
_MAX_REASON = 400  # characters; onnxruntime names the place in its source first, and the reason last


def _reason(error: Exception) -> str:
    """Return the reason that onnxruntime gives, and what to do if it is too old for a file."""
    text = _PLACES.sub("", " ".join(str(error).split()))
    advice = "; update onnxruntime, or export the model for an earlier version" * bool(re.search("IR v|opset v", text))
    return f"{'...' if len(text) > _MAX_REASON else ''}{text[-_MAX_REASON:].rstrip('.')}{advice}"


class OnnxBackbone(AnyClassifier):
    """A classifier in an ONNX file: forward passes only."""

    def __init__(self, module: OnnxClassifier) -> None:
        super().__init__(UnwrappedModel(module, module))
        self._file = module

    @property
    def forward_only(self) -> str:
        return f"{self._file.path.name} is an ONNX file"

    @property
    def advice_on_norms(self) -> str:
        from remtta.formats.adaptive.norms import convolutions, find_norms

        if self.batch_norms:  # in torch
            return ""
        graph, name = read_graph(self._file.path, whole=True).proto.graph, self._file.path.name
        if not (norms := find_norms(graph)) and not convolutions(graph):
            return ""
        source_data = "" if norms else " --source-data FOLDER (clean images)"
        advice = f"those of a file by remtta export --adaptive{source_data} do"
        return f"batch norms of {name} do not follow the stream; {advice}"

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


FAMILIES: dict[type[nn.Module], type[OnnxBackbone]] = {OnnxClassifier: OnnxBackbone}
