"""Prepare a run: set up the method on the model, with its observers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from remtta.adapt.image_inputs import warn_of_guess
from remtta.deltas import DELTA
from remtta.deltas.delta import Delta, check_base
from remtta.errors import UsageError, counted
from remtta.guard.accuracy import WINDOW, Calibration, Estimator
from remtta.guard.guard import guarded
from remtta.guard.observed import ObservedMethod
from remtta.guard.smoothing import Smoother
from remtta.methods.fitting import fitting_micro_batch
from remtta.methods.method import Method, build_method
from remtta.methods.settings import METHOD_TABLE, MethodConfig, check_method, settings_of
from remtta.methods.source_data import FEW_IMAGES, check_source_data, clean_batches, learn_from_source, source_files
from remtta.models.card import ModelCard
from remtta.models.unwrapping import unwrap_model
from remtta.options import GuardOptions, RunOptions
from remtta.runs.folder import RECORD
from remtta.runs.manifest import RunContext
from remtta.runs.reading import read_record
from remtta.streams.sources import Stream

_FIRST: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # hash of each model when it was first adapted

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class AdaptationConfig:
    """The settings of an adaptation, independent of the stream."""

    method: str = "remtta"  # name of the adaptation method
    # Those of its settings that differ from its defaults, or a whole config.
    config: MethodConfig | Mapping[str, Any] | None = None
    options: RunOptions = field(default_factory=RunOptions)  # options of the run
    delta: Delta | None = None  # adapted weights to start from
    # Clean source images or their statistics, for methods that need them and for the accuracy estimate.
    source_data: str | Path | None = None
    calibration: Calibration | None = None  # of the estimate, if another stream has made it from the same images


def own_guard(method: str, options: RunOptions) -> RunOptions:
    """Return the options with the method's default guard action and answer, where they are left open."""
    check_method(method, METHOD_TABLE)
    if options.guard is None:
        return options
    preset = METHOD_TABLE[method].preset
    return replace(options, guard=options.guard.filled(preset.action, preset.answer))


def plan_run(
    model: nn.Module, card: ModelCard, stream: Stream, folder: Path, setup: AdaptationConfig, wait: Callable[[], None]
) -> RunContext:
    """Set up a method on a model at its source weights, to adapt it to a stream. Raise UsageError if a stream cannot
    use the method, or options do not apply to it; ModelError if the method cannot adapt the model; DeltaError if the
    delta does not fit the model.

    Args:
        model: The model, into which a starting delta is loaded.
        folder: The run's folder, which may hold an earlier part of the run.
        wait: Called from time to time; may raise to stop.
    """
    options = own_guard(setup.method, setup.options)
    resuming = options.resume and (folder / RECORD).exists()
    earlier = read_record(folder / RECORD) if resuming else None
    adapter, config, learned = set_up(model, card, replace(setup, options=options), wait, earlier)
    return RunContext(card, adapter, setup.method, config, options, stream, setup.delta, learned, earlier=earlier)


@torch.inference_mode(False)  # the caller may be inside one
def set_up(
    model: nn.Module,
    card: ModelCard,
    setup: AdaptationConfig,
    wait: Callable[[], None],
    earlier: Mapping[str, Any] | None = None,
) -> tuple[ObservedMethod, MethodConfig, Mapping[str, Any] | None]:
    """Set a method and its observers up on a model at its source weights; raise RemttaError as `plan_run` does.

    Return them, the method's settings, and what it learned from source images, for the record.

    Args:
        model: The model, which the delta's weights are put into.
        setup: How it is adapted, with the guard's action and answer filled in.
        wait: Called now and then meanwhile; may raise to stop.
        earlier: The record of the run to resume.
    """
    with _unchanged_on_failure(model):
        method, delta, source_data, options = setup.method, setup.delta, setup.source_data, setup.options
        config = settings_of(method, setup.config, batch_size=options.batch_size)
        torch.manual_seed(options.seed)
        built = build_method(method, model, config)
        _check_method(built, method, source_data, options)
        learned = None
        if source_data is not None and built.objective.needs_source:
            learned = learn_from_source(built, source_data, name=method, wait=wait)
        guard = guarded(built, options.guard)
        estimator = _estimator(built, card, setup, earlier, wait)
        if options.max_memory is not None and config.micro_batch is None:
            config = _within_memory(built, card, config, options, earlier)
        if delta is not None:
            check_base(delta, card.sha256)
            built.load_delta(delta.tensors, delta.updates)
        smoother = Smoother(card.num_classes) if options.smooth == "auto" else None
        return (ObservedMethod(built, [each for each in (guard, estimator, smoother) if each]), config, learned)


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


def warn_of_change(model: nn.Module, card: ModelCard) -> None:
    """Warn if a model's weights, of which the card has the hash, are not those that it was first adapted from."""
    if _FIRST.setdefault(unwrap_model(model).module, card.sha256) != card.sha256:
        _log.warning(
            "the model's weights have changed since it was first adapted, and now count as the source weights; build "
            "the model anew to start from the first ones"
        )


def log_plan(plan: RunContext) -> None:
    """Log what is about to run, and warn about surprising settings."""
    method, card, options = plan.adapter.method, plan.card, plan.options
    every, size = options.reset_every, options.batch_size
    if every is not None and every < size:
        _log.warning(
            "--reset-every %d is less than a batch of %d frames: the weights are reset before every batch", every, size
        )
    warn_of_guess(card)
    _warn_of_guard(plan)
    if method.net.centred and not method.net.biases:
        _log.info("the head has no bias to hold the offset of centred logits, so deltas are without it")
    names = method.adapted_names
    _log.debug("%s adapts %d tensors, %s", plan.method, len(names), ", ".join(names) or "none")
    _log.debug("preprocessing: %s", card.preprocessing)
    _log.debug("base weights: sha256 %s, on %s", card.sha256, card.device)
    if not method.norms_only and not options.save_full and not method.objective.delta_refusal:
        megabytes = sum(tensor.nbytes for tensor in method.committed[0].values()) / 1e6
        text = "%s changes every weight, so no %s is written; --save-full writes one of %.0f MB"
        _log.warning(text, plan.method, DELTA, megabytes)


def _warn_of_guard(plan: RunContext) -> None:
    """Warn of a guard action or an answer that was asked for, and that the method cannot have."""
    guard, preset = plan.adapter.guard, METHOD_TABLE[plan.method].preset
    asked = plan.options.guard or GuardOptions()
    had = guard.options if guard else GuardOptions("off", "adapted")
    for option, value, usual, now in (
        ("--guard", asked.action, preset.action, had.action),
        ("--answer", asked.answer, preset.answer, had.answer),
    ):
        if value not in (None, usual, now):
            _log.warning("%s %s has no effect on --method %s", option, value, plan.method)


def _check_method(method: Method, name: str, source_data: str | Path | None, options: RunOptions) -> None:
    if method.objective.needs_labels:
        raise UsageError(f"{name} needs labels, and a stream has none; use it in remtta eval")
    if options.save_full and method.objective.delta_refusal:
        raise UsageError(f"{method.objective.delta_refusal}, so --save-full has nothing to save; leave it out")
    check_source_data([name], source_data, calibrates=options.estimate is not None)


def _estimator(
    method: Method,
    card: ModelCard,
    setup: AdaptationConfig,
    earlier: Mapping[str, Any] | None,
    wait: Callable[[], None],
) -> Estimator | None:
    """Return the accuracy estimator, if requested; a resumed run keeps its calibration."""
    options, source_data = setup.options, setup.source_data
    if options.estimate is None:
        return None
    if earlier and earlier.get("accuracy"):
        calibration = Calibration(**earlier["accuracy"]["calibration"])
    elif setup.calibration is not None:
        calibration = setup.calibration
    elif source_data is None:
        calibration = Calibration.unseen(options.estimate, card.num_classes)
    else:
        files = source_files(Path(source_data))
        with contextlib.closing(clean_batches(files, card.preprocessing, card.device, WINDOW, wait)) as batches:
            logits = torch.cat([method.predict_source(batch).float().cpu() for batch in batches])
        if len(logits) < FEW_IMAGES:
            _log.warning(
                "the estimate is calibrated on only %s; a few hundred are better", counted(len(logits), "image")
            )
        calibration = Calibration.seen(options.estimate, logits)
    return Estimator(calibration, card.num_classes, options.expire_below)


def _within_memory(
    method: Method, card: ModelCard, config: MethodConfig, options: RunOptions, earlier: Mapping[str, Any] | None
) -> MethodConfig:
    """Return the config with a micro-batch that respects `max_memory`; a resumed run keeps its micro-batch."""
    assert options.max_memory is not None
    if not method.trains:
        _log.warning("--max-memory has no effect: the method trains no weights")
        return config
    if earlier is not None:
        size = earlier.get("method", {}).get("micro_batch")
    else:
        size = fitting_micro_batch(method, card.preprocessing.input_size, options.batch_size, options.max_memory)
    if size is None:
        return config
    method.net.micro_batch = size
    _log.info("--max-memory: micro-batches of %d", size)
    return replace(config, micro_batch=size)
