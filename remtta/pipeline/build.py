"""Build a pipeline: the method on the model, with guard and transforms of predictions. Every caller does it here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remtta.deltas.delta import Delta, check_base
from remtta.errors import UsageError, counted
from remtta.methods import rem
from remtta.methods.base import Method
from remtta.methods.build import build_method, create_method
from remtta.methods.fitting import fitting_micro_batch
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.source import CenteredSource
from remtta.methods.source_data import FEW_IMAGES, check_source_data, clean_batches, source_files
from remtta.methods.table import METHOD_TABLE, check_method, settings_of
from remtta.models.info import ModelInfo
from remtta.models.precision import multiplies_bf16
from remtta.options import GuardOptions, RunOptions
from remtta.pipeline.accuracy import WINDOW, Calibration, Estimator
from remtta.pipeline.forward import source_logits
from remtta.pipeline.guard import guard_for
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.precision import Resolved, recorded_precision, resolve_precision
from remtta.pipeline.prediction import PredictionTransform
from remtta.pipeline.smoothing import Smoother
from remtta.pipeline.temperature import TemperatureScaling

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptationConfig:
    """The settings of an adaptation, independent of the stream.

    Attributes:
        method: Name of the method.
        config: Those of its settings that differ from its defaults, or a whole config.
        options: Options of the run.
        delta: Adapted weights to start from.
        source_data: Clean source images or their statistics, for methods that need them and for the accuracy estimate.
        calibration: Of the estimate, if another stream has made it from the same images.
    """

    method: str = "remtta"
    config: MethodConfig | Mapping[str, Any] | None = None
    options: RunOptions = field(default_factory=RunOptions)
    delta: Delta | None = None
    source_data: str | Path | None = None
    calibration: Calibration | None = None

    def with_guard(self) -> AdaptationConfig:
        """Return the same with the method's default guard action and answer, where they are left open."""
        check_method(self.method, METHOD_TABLE)
        if self.options.guard is None:
            return self
        preset = METHOD_TABLE[self.method].preset
        guard = self.options.guard.filled(preset.action, preset.answer)
        return replace(self, options=replace(self.options, guard=guard))


def REM(model: nn.Module, config: REMConfig | None = None) -> Pipeline:
    """Set up REM on a model, as published: `logits = rem(images)` predicts a batch (B, 3, H, W), then adapts to it.

    Args:
        model: A float32 image classifier, possibly inside DataParallel or torch.compile.
        config: Settings; by default the paper's.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
        UsageError: If a mask ratio leaves no patch token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 to 5.
    """
    return Pipeline(create_method(rem.REM, model, config or REMConfig()))


@torch.inference_mode(False)  # the caller may be inside one
@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
def build_pipeline(
    model: nn.Module,
    info: ModelInfo,
    config: AdaptationConfig,
    wait: Callable[[], None] = lambda: None,
    earlier: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Build a pipeline on a model at its source weights.

    Args:
        model: The model, which the delta's weights are put into.
        info: Its preprocessing, labels and number of classes.
        config: How it is adapted, `with_guard`.
        wait: Called now and then meanwhile; may raise to stop.
        earlier: The record of the run to resume.

    Raises:
        UsageError: If a stream cannot use the method, or options do not apply to it.
        ModelError: If the method cannot adapt the model.
        DeltaError: If the delta does not fit the model.
    """
    with _unchanged_on_failure(model):
        options, source_data, delta = config.options, config.source_data, config.delta
        settings = settings_of(config.method, config.config, batch_size=options.batch_size)
        torch.default_generator.manual_seed(options.seed)
        method = build_method(config.method, model, settings)
        _check_method(method, config)
        _resolve_precision(method, info, config, earlier)
        source_record = None
        if source_data is not None and method.needs_source_data:
            source_record = method.learn_from_source(source_data, name=config.method, wait=wait)
        estimator = None
        if options.estimate is not None:
            calibration = _calibration(method, info, config, earlier, wait)
            alone = only_centers(method) and not method.model.batch_norms.mixes
            estimator = Estimator(
                calibration, info.num_classes, options.expire_below, adapts=method.adapts, only_centers=alone
            )
        if options.max_memory is not None and settings.micro_batch is None:
            _limit_memory(method, info, options, earlier)
        smoother = Smoother(info.num_classes) if options.smooth == "auto" else None
        pipeline = assemble_pipeline(method, options.guard, estimator, smoother)
        pipeline.source_record = source_record
        if delta is not None:
            check_base(delta, info.sha256)
            pipeline.load_delta(delta.tensors, delta.updates, delta.frames)
        return pipeline


def assemble_pipeline(
    method: Method[MethodConfig], options: GuardOptions | None, *transforms: PredictionTransform | None
) -> Pipeline:
    """Put a guard, if it has something to do, temperature scaling of an ensemble or of a method that only centers, and
    other transforms of predictions around a method, in the order in which they act.
    """
    guard = guard_for(method, options)
    is_ensemble = guard is not None and guard.options.answer == "both"
    scales, trains = is_ensemble or only_centers(method), method.trains != "none"
    moves = method.model.batch_norms.moves
    scaling = TemperatureScaling(method.model.num_classes, trains=trains, moves=moves) if scales else None
    return Pipeline(method, guard, [transform for transform in (scaling, *transforms) if transform is not None])


def only_centers(method: Method[MethodConfig]) -> bool:
    """Return whether a method trains nothing, and centers logits."""
    return isinstance(method, CenteredSource) and method.config.center


@contextlib.contextmanager
def _unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Leave the model as trainable as before, and an earlier method on it working, if the block fails."""
    modes = [(module, module.training) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, mode in modes:
            module.training = mode
        for parameter, requires_grad in trained:
            if not parameter.is_inference():
                parameter.requires_grad_(requires_grad)
        raise


def _check_method(method: Method[MethodConfig], config: AdaptationConfig) -> None:
    name, options = config.method, config.options
    if method.needs_labels:
        raise UsageError(f"{name} needs labels, and a stream has none; choose another method")
    if options.save_full and method.delta_refusal:
        raise UsageError(f"{method.delta_refusal}, so --save-full has nothing to save; leave it out")
    check_source_data([name], config.source_data, calibrates=options.estimate is not None)


def _resolve_precision(
    method: Method[MethodConfig], info: ModelInfo, config: AdaptationConfig, earlier: Mapping[str, Any] | None
) -> None:
    """Resolve "auto": a resumed run keeps its precision, and one that starts from a delta that of the delta's run."""
    chosen: Resolved | None = None
    delta = config.delta
    if earlier is not None:
        chosen = recorded_precision(earlier.get("method", {}))
    elif isinstance(delta, Delta) and delta.method == config.method:
        recorded = delta.hyperparameters.get("precision")
        if recorded == "fp32" or (recorded == "bf16" and multiplies_bf16(info.device)):
            chosen = recorded_precision(delta.hyperparameters)
    resolve_precision(method, config.method, chosen)


def _calibration(
    method: Method[MethodConfig],
    info: ModelInfo,
    config: AdaptationConfig,
    earlier: Mapping[str, Any] | None,
    wait: Callable[[], None],
) -> Calibration:
    """Return the calibration of the accuracy estimate; a resumed run keeps its own."""
    accuracy = config.options.estimate
    assert accuracy is not None
    if earlier and earlier.get("accuracy"):
        return Calibration(**earlier["accuracy"]["calibration"])
    if config.calibration is not None:
        return config.calibration
    if config.source_data is None:
        return Calibration.assumed(accuracy, info.num_classes)
    files = source_files(Path(config.source_data))
    with contextlib.closing(clean_batches(files, info.preprocessing, info.device, WINDOW, wait)) as batches:
        transform = method.model.transform
        logits = torch.cat([source_logits(method, transform(batch)).float().cpu() for batch in batches])
    if len(logits) < FEW_IMAGES:
        _log.warning("the estimate is calibrated on only %s; a few hundred are better", counted(len(logits), "image"))
    return Calibration.fit(accuracy, logits)


def _limit_memory(
    method: Method[MethodConfig], info: ModelInfo, options: RunOptions, earlier: Mapping[str, Any] | None
) -> None:
    """Choose a micro-batch that respects `max_memory`; a resumed run keeps its micro-batch."""
    assert options.max_memory is not None
    if not method.trained:
        _log.warning("--max-memory has no effect: the method trains no weights")
        return
    if earlier is not None:
        size = earlier.get("method", {}).get("micro_batch")
    else:
        size = fitting_micro_batch(method, info.preprocessing.input_size, options.batch_size, options.max_memory)
    if size is not None:
        method.model.micro_batch, method.config = size, replace(method.config, micro_batch=size)
        _log.info("--max-memory: micro-batches of %d", size)
