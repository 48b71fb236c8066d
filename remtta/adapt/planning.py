"""A run before its first frame: the method on the model, ready to adapt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remtta.deltas import DELTA
from remtta.deltas.delta import Delta, check_base
from remtta.errors import UsageError
from remtta.guard.accuracy import WINDOW, Calibration, Estimator
from remtta.guard.guard import guarded
from remtta.guard.observed import ObservedMethod
from remtta.guard.pace import pacing
from remtta.guard.smoothing import Smoother
from remtta.methods.fitting import fitting_micro_batch
from remtta.methods.method import Method, build_method
from remtta.methods.settings import METHOD_TABLE, MethodConfig, check_method, method_config
from remtta.methods.source_data import FEW_IMAGES, check_source_data, clean_batches, learn_from_source
from remtta.models.card import ModelCard
from remtta.options import RunOptions
from remtta.runs.folder import RECORD
from remtta.runs.reading import read_record
from remtta.runs.record import Plan
from remtta.streams.sources import Stream

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Setup:
    """How a model is adapted, whatever the stream.

    Attributes:
        method: Name of the adaptation method.
        config: Its settings; those of its name if None.
        options: How a stream is run.
        delta: Adapted weights to start from.
        source_data: What methods learn from that learn from the source first, and the estimate from.
    """

    method: str = "remtta"
    config: MethodConfig | None = None
    options: RunOptions = field(default_factory=RunOptions)
    delta: Delta | None = None
    source_data: str | Path | None = None


def own_guard(method: str, options: RunOptions) -> RunOptions:
    """The options with the method's own guard action and answer, where they leave them open.

    Raises:
        UsageError: If the method is unknown.
    """
    check_method(method, METHOD_TABLE)
    if options.guard is None:
        return options
    named = METHOD_TABLE[method]
    return replace(options, guard=options.guard.filled(named.action, named.answer))


def plan_run(
    model: nn.Module, card: ModelCard, stream: Stream, folder: Path, setup: Setup, wait: Callable[[], None]
) -> Plan:
    """Set a method up on a model at its source weights, to adapt it to a stream.

    Args:
        model: The model, which the delta's weights are put into.
        card: The model's.
        stream: Where the frames come from.
        folder: The run's folder, which may hold an earlier part of it.
        setup: How it is adapted.
        wait: Called now and then meanwhile; may raise to stop.

    Raises:
        UsageError: If a stream cannot run the method, or options have no use for it.
        ModelError: If the method cannot adapt the model.
        DeltaError: If the delta does not fit the model.
    """
    options = own_guard(setup.method, setup.options)
    going_on = options.resume and (folder / RECORD).exists()
    earlier = read_record(folder / RECORD) if going_on else None
    adapter, config, learned = set_up(model, card, replace(setup, options=options), wait, earlier)
    return Plan(card, adapter, setup.method, config, options, stream, setup.delta, learned, earlier=earlier)


def set_up(
    model: nn.Module, card: ModelCard, setup: Setup, wait: Callable[[], None], earlier: Mapping[str, Any] | None = None
) -> tuple[ObservedMethod, MethodConfig, Mapping[str, Any] | None]:
    """Set a method and its observers up on a model at its source weights.

    Args:
        model: The model, which the delta's weights are put into.
        card: The model's.
        setup: How it is adapted, with the guard's action and answer filled in.
        wait: Called now and then meanwhile; may raise to stop.
        earlier: The record of the run that it goes on with.

    Returns:
        The method with its observers, its settings, and what it learned from source images, for the record.

    Raises:
        RemttaError: As of `plan_run`.
    """
    method, delta, source_data, options = setup.method, setup.delta, setup.source_data, setup.options
    config = setup.config or method_config(method, {}, batch_size=options.batch_size)
    torch.manual_seed(options.seed)
    built = build_method(method, model, config)
    _check_method(built, method, source_data, options)
    learned = None
    if source_data is not None and built.objective.needs_source:
        learned = learn_from_source(built, model, source_data, method=method, config=config, wait=wait)
    guard = guarded(built, options.guard, config, sparing=options.adapt == "auto")
    estimator = _estimator(built, card, source_data, options, earlier, wait)
    if options.max_memory is not None and config.micro_batch is None:
        config = _within_memory(built, card, config, options, earlier)
    if delta is not None:
        check_base(delta, card.sha256)
        built.load_delta(delta.tensors, delta.updates)
    smoother = Smoother(card.num_classes) if options.smooth == "auto" else None
    pace = pacing(built, options.adapt)
    return ObservedMethod(built, [each for each in (pace, guard, estimator, smoother) if each]), config, learned


def tell_plan(plan: Plan) -> None:
    """Say what is about to run, and warn of what a user may not expect."""
    adapter, card, options = plan.adapter.method, plan.card, plan.options
    every, size = options.reset_every, options.batch_size
    if every is not None and every < size:
        _log.warning("a reset every %d frames, with %d frames per update, is one before every batch", every, size)
    names = adapter.adapted_names
    _log.debug("%s adapts %d tensors, %s", plan.method, len(names), ", ".join(names) or "none")
    _log.debug("preprocessing: %s", card.preprocessing)
    _log.debug("base weights: sha256 %s, on %s", card.sha256, card.device)
    if not adapter.norms_only and not options.save_full and not adapter.objective.delta_refusal:
        megabytes = sum(tensor.nbytes for tensor in adapter.committed[0].values()) / 1e6
        _log.warning(
            "%s changes every weight, so no %s is written; --save-full writes one, of %.0f MB",
            plan.method,
            DELTA,
            megabytes,
        )


def _check_method(adapter: Method, name: str, source_data: str | Path | None, options: RunOptions) -> None:
    """Refuse a method that a stream cannot run, or options that it has no use for."""
    if adapter.objective.needs_labels:
        raise UsageError(f"{name} learns from labels, which a stream has none of; use it in remtta eval")
    if options.save_full and adapter.objective.delta_refusal:
        raise UsageError(f"{adapter.objective.delta_refusal}, so there is nothing for --save-full; leave it out")
    check_source_data([name], source_data, calibrates=options.estimate is not None)


def _estimator(
    adapter: Method,
    card: ModelCard,
    source_data: str | Path | None,
    options: RunOptions,
    earlier: Mapping[str, Any] | None,
    wait: Callable[[], None],
) -> Estimator | None:
    """What estimates the accuracy, if that is asked for; calibrated as the run was that it goes on with."""
    if options.estimate is None:
        return None
    if earlier and earlier.get("accuracy"):
        calibration = Calibration(**earlier["accuracy"]["calibration"])
    elif source_data is None:
        calibration = Calibration.unseen(options.estimate, card.num_classes)
    else:
        with contextlib.closing(clean_batches(source_data, card.preprocessing, card.device, WINDOW, wait)) as batches:
            logits = torch.cat([adapter.predict_source(batch).float().cpu() for batch in batches])
        if len(logits) < FEW_IMAGES:
            _log.warning("the estimate is calibrated on %d image(s) only; give it some hundreds", len(logits))
        calibration = Calibration.seen(options.estimate, logits)
    return Estimator(calibration, card.num_classes, options.expire_below)


def _within_memory(
    adapter: Method,
    card: ModelCard,
    config: MethodConfig,
    options: RunOptions,
    earlier: Mapping[str, Any] | None,
) -> MethodConfig:
    """The config with a micro-batch that keeps to `max_memory`; the one the run began with, where it goes on."""
    assert options.max_memory is not None
    if not adapter.trains:
        _log.warning("--max-memory chooses the micro-batch of methods that train weights, and changes nothing here")
        return config
    if earlier is not None:
        size = earlier.get("method", {}).get("micro_batch")
    else:
        size = fitting_micro_batch(adapter, card.preprocessing.input_size, options.batch_size, options.max_memory)
    if size is None:
        return config
    adapter.net.micro_batch = size
    _log.info("--max-memory: %d images at a time", size)
    return replace(config, micro_batch=size)
