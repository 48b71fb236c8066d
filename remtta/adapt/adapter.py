"""`remtta.Adapter`: adapt a model inside your own program, as `remtta adapt` does."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from remtta.adapt.image_inputs import ImageInputs, Images
from remtta.deltas.delta import Delta, save_delta
from remtta.errors import ModelError, NotFiniteError, UsageError
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.chosen import default_method
from remtta.methods.table import FULL_BATCH, method_config
from remtta.models.info import UNKNOWN, ModelInfo, model_info, read_labels, warn_of_change
from remtta.models.loading import load_model
from remtta.models.metadata import ModelMetadata, ModelWithMetadata, Output, metadata_of
from remtta.models.precision import multiplies_bf16
from remtta.models.preprocessing import Preprocessing
from remtta.models.unwrapping import unwrap_model
from remtta.models.weights import count_in
from remtta.options import DEFAULT_BATCH_SIZE, Action, Answer, GuardOptions, RunOptions, Smooth
from remtta.options.loaders import is_model_file
from remtta.pipeline.build import AdaptationConfig, build_pipeline
from remtta.pipeline.events import log_event
from remtta.pipeline.precision import Resolved, set_precision
from remtta.runs.loop import load_whole
from remtta.runs.record import delta_of

_FROZEN, _FRAMES, _PRECISION = "frozen", "frames", "precision"
_SHARED = (
    "a later Adapter was made of the same model, and two cannot share one; build a model for each, or copy it before "
    "the first Adapter is made"
)

_OTHER_STATE = "the state does not fit an adapter of this model, method and settings"

_log = logging.getLogger("remtta")


class Adapter:
    """A classifier that adapts to its inputs as `remtta adapt` does, with the method, centered logits and the guard.

        adapter = remtta.Adapter(model)
        probs = adapter(images)  # (B, C); predicts, then updates

    It may be called from any number of threads and serves one at a time. A process forked during or after a call hangs
    in its own, as in any computation of torch on several threads; let `multiprocessing` spawn. The model belongs to it
    alone, as its weights change in place and only those that adapt require gradients, until `close` or its end. If an
    error ends a call, the weights are those before or after its update, and its images may count in the centering.

    Attributes:
        info: The model's preprocessing, labels and number of classes.
        options: The run's options.
        config: The method's settings.

    Args:
        model: A classifier of images (B, 3, H, W), adapted in place, in eval mode; or the path of an ONNX file.
        method: Name of the method; by default "remtta", or "fast" for an ONNX file.
        batch_size: Images per call, or per batch of `stream`. Below 20 the learning rate is reduced in proportion.
        output: Function from what the model returns to logits (B, C), for a model that returns something else.
        patch_size: Height and width of the patches that masks hide, in pixels; None to choose by the model.
        preprocessing: How pictures become inputs; None for the model's own, or for preprocessed images only.
        labels: Class names, also by number or as a file with one per line; None for the model's own.
        guard: What the guard does against harm; None for the method's default. "stop" is for runs.
        answer: Which model predicts; None for the method's default.
        smooth: "auto" if calls and frames come in order, as on video.
        delta: Adapted weights to start from.
        source_data: Folder of clean images without labels, for methods that need them first.
        seed: Seed of every random choice.
        settings: Settings of the method, named as in its config; its defaults where left out.

    Raises:
        ModelError, UsageError: If the model cannot be adapted, or a method or value is wrong; with what to do.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        method: str | None = None,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        output: Output | None = None,
        patch_size: tuple[int, int] | None = None,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
        guard: Action | None = None,
        answer: Answer | None = None,
        smooth: Smooth = "off",
        delta: Delta | None = None,
        source_data: str | Path | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if isinstance(model, str | Path) and is_model_file(model):
            model = load_model(str(model))
        described = ModelWithMetadata(model, output, patch_size, preprocessing, read_labels(labels))  # type: ignore[arg-type]
        self.info = model_info(described)
        warn_of_change(described, self.info)
        if guard == "stop":
            raise UsageError('guard="stop" ends a run, and an Adapter has none; choose "rollback"')
        module = unwrap_model(described).module
        requires_grad: dict[Tensor, bool] = {each: each.requires_grad for each in module.parameters()}
        options = RunOptions(batch_size=batch_size, guard=GuardOptions(guard, answer), smooth=smooth, seed=seed)
        method = method or default_method(self.info.name)
        config = method_config(method, settings, batch_size=batch_size)
        setup = AdaptationConfig(method, config, options, delta, source_data).with_guard()
        self.options = setup.options
        with _on_cpu():
            self.pipeline = build_pipeline(described, self.info, setup)
        self._name, self._small_calls = method, 0  # in a row
        self._model_name = type(module).__name__ if self.info.name == UNKNOWN else self.info.name
        self._chose_precision = config.precision == "auto"
        self._origin = {"base_sha256": _as_tensor(self.info.sha256), "method": _as_tensor(method)}
        self._lock = threading.RLock()
        self._module, self._metadata = module, metadata_of(module)
        self._metadata.adapter = ref(self)
        self._metadata.requires_grad = {**requires_grad, **self._metadata.requires_grad}
        self._release = finalize(self.pipeline, _release, self._metadata)
        self.image_inputs = ImageInputs(self.info)

    @property
    def card(self) -> ModelInfo:
        """Deprecated: `info`."""
        warnings.warn("Adapter.card is called Adapter.info", DeprecationWarning, stacklevel=2)
        return self.info

    @property
    def config(self) -> MethodConfig:
        """The method's settings."""
        return self.pipeline.method.config

    @property
    def frozen(self) -> bool:
        """True if it only predicts from now on."""
        return self.pipeline.frozen

    def __call__(self, images: Images) -> Tensor:
        """Predict images, then update on them; return class probabilities (B, C), on the CPU.

        Raises:
            ValueError: If they are not a batch of images, or their values are not finite; there is no update then.
            UsageError: If they are not preprocessed, and the model's preprocessing is not known.
            NotFiniteError: If the model's outputs are not finite numbers; there is no update then.
        """
        pixels, pipeline = self.image_inputs.inputs(images), self.pipeline
        with self.exclusive():
            prediction = pipeline.predict(pixels)
            if not torch.isfinite(prediction.logits).all():
                raise NotFiniteError("the model's outputs are not finite numbers; use a lower lr, or check its weights")
            pipeline.learn()
            self.log_events()
            self._warn_of_few(len(pixels))
        return prediction.logits.float().softmax(-1).cpu()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the model while no other thread does, in the configured precision; raise UsageError if it is not ours,
        or ModelError if its weights were converted or moved.
        """
        with self._lock, _on_cpu(), torch.autocast(self.info.device.type, enabled=False):
            if not self._release.alive:
                raise UsageError("the Adapter is closed; make another of its model")
            if self._metadata.adapter != ref(self):
                raise UsageError(_SHARED)
            weight = next(self._module.parameters())
            if (weight.dtype, weight.device) != (torch.float32, self.info.device):
                raise ModelError(
                    f"the model's weights have become {weight.dtype} on {weight.device} since the Adapter was made; "
                    'build both anew (Adapter(..., precision="bf16") computes in half precision)'
                )
            yield

    def close(self) -> None:
        """End the adaptation and keep the model's present weights, which require gradients as before it."""
        with self._lock:
            if self._metadata.adapter == ref(self):
                self._metadata.adapter = None
            self._release()

    def freeze(self) -> None:
        """Only predict from now on, each image by itself (except with bn="batch"); after `reset` as the source does."""
        self.pipeline.frozen = True

    def unfreeze(self) -> None:
        """Adapt again, from the present state."""
        self.pipeline.frozen = False

    def reset(self) -> None:
        """Go back to the source weights, exactly, in the same stream: alarms, and `frozen`, stay as they are."""
        with self.exclusive():
            self.pipeline.reset()

    def restart(self) -> None:
        """Go back to the source weights for another stream, of which nothing is known yet; `frozen` stays."""
        with self.exclusive():
            self.pipeline.start_new_stream()

    def delta(self) -> dict[str, Tensor]:
        """Return adapted minus source weights by parameter name; a linear head's bias has the centering's offset."""
        with self.exclusive():
            return self.pipeline.delta()

    def save_delta(self, path: str | Path, *, overwrite: bool = True) -> None:
        """Write the delta and its origin to a file, as `remtta adapt` does, for `load_delta` and `remtta apply`.

        Raises:
            UsageError: If the method changes no weights that a delta can hold, or the file may not be overwritten.
            DeltaError, OutputError: If a value is not finite, or the file cannot be written; an existing one is kept.
        """
        with self.exclusive():
            committed, size = self.pipeline.committed, self.options.batch_size
            if refusal := self.pipeline.method.delta_refusal or (
                not committed.delta and f"{self._name} changes no weights"
            ):
                raise UsageError(f"there is no delta to save: {refusal}")
            delta = delta_of(self.info, self._name, self.config, size, committed)
            save_delta(path, delta, overwrite=overwrite)

    def __repr__(self) -> str:
        num_updates = self.pipeline.method.num_updates
        return f"Adapter({self._model_name}, method={self._name!r}, updates={num_updates}, frozen={self.frozen})"

    def __reduce__(self) -> Never:
        """Raise TypeError: an adapter is bound to its model."""
        raise TypeError("an Adapter cannot be copied or pickled; load its state_dict() into one of a model built alike")

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that later predictions depend on, on the CPU, for `torch.save` or safetensors."""
        with self.exclusive():
            numbers = {_FROZEN: torch.tensor(self.frozen), _FRAMES: torch.tensor(self.pipeline.frames_in_delta)}
            origin = {**self._origin, _PRECISION: _as_tensor(self.config.precision)}
            return {**self.pipeline.state_dict(), **origin, **numbers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; raise UsageError, and change nothing, if it fits no such adapter."""
        with self.exclusive():
            before = self.pipeline.state_dict()
            try:
                for name, wanted in self._origin.items():
                    if name not in state or state[name].tolist() != wanted.tolist():
                        raise ValueError(f"its {name} is another or missing")
                others = (_FROZEN, _FRAMES, _PRECISION, *self._origin)
                load_whole({name: tensor for name, tensor in state.items() if name not in others}, self.pipeline)
                frozen, frames = bool(count_in(state, _FROZEN)), count_in(state, _FRAMES)
                if self._chose_precision and (precision := _usable_precision(state, self.info.device)):
                    set_precision(self.pipeline.method, precision)
                self.pipeline.frozen, self.pipeline.frames_in_delta = frozen, frames
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self.pipeline.load_state_dict(before)
                raise UsageError(f"{_OTHER_STATE} ({error})") from error

    def log_events(self) -> None:
        """Log the guard's decisions since the last call."""
        for event in self.pipeline.events():
            log_event(event)

    def _warn_of_few(self, count: int) -> None:
        size, learns = self.options.batch_size, self.pipeline.learns and self.pipeline.method.trained
        self._small_calls = self._small_calls + 1 if learns and count < min(FULL_BATCH, size) else 0
        if self._small_calls == 2:  # a single one may be the rest of a source
            message = "got %d images, but the learning rate is for batches of %d; pass batch_size=%d to remtta.Adapter"
            _log.warning(message, count, size, count)


def _release(metadata: ModelMetadata) -> None:
    """Let a model's weights require gradients as before its adapters, unless there is still one."""
    if metadata.adapter is None or metadata.adapter() is None:
        for parameter, requires_grad in metadata.requires_grad.items():
            parameter.requires_grad_(requires_grad)
        metadata.requires_grad = {}


def _usable_precision(state: Mapping[str, Tensor], device: torch.device) -> Resolved | None:
    """Return the precision of a state, if the device computes in it; states of earlier versions have none."""
    names: tuple[Resolved, ...] = ("fp32", "bf16") if multiplies_bf16(device) else ("fp32",)
    return next((name for name in names if torch.equal(state.get(_PRECISION, torch.empty(0)), _as_tensor(name))), None)


def _as_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """Make tensors on the CPU where no device is named, whatever `torch.set_default_device` says."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
