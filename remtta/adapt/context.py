"""Prepare a run on a stream, and log what is about to happen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import nn

from remtta.adapt.image_inputs import warn_of_guess
from remtta.deltas import DELTA
from remtta.methods.settings import METHOD_TABLE
from remtta.models.card import ModelCard
from remtta.models.metadata import metadata_of
from remtta.models.unwrapping import unwrap_model
from remtta.options import GuardOptions
from remtta.pipeline.build import AdaptationConfig, build_pipeline
from remtta.runs.folder import RECORD
from remtta.runs.manifest import RunContext
from remtta.runs.reading import read_record
from remtta.streams.sources import Stream

_log = logging.getLogger(__name__)


def prepare_run(
    model: nn.Module, card: ModelCard, stream: Stream, folder: Path, config: AdaptationConfig, wait: Callable[[], None]
) -> RunContext:
    """Build a pipeline on a model at its source weights, to adapt it to a stream; raise as `build_pipeline` does.

    Args:
        model: The model, into which a starting delta is loaded.
        folder: The run's folder, which may hold an earlier part of the run.
        wait: Called from time to time; may raise to stop.
    """
    config = config.with_guard()
    resuming = config.options.resume and (folder / RECORD).exists()
    earlier = read_record(folder / RECORD) if resuming else None
    pipeline = build_pipeline(model, card, config, wait, earlier)
    return RunContext(card, pipeline, config.method, config.options, stream, config.delta, earlier=earlier)


def warn_of_change(model: nn.Module, card: ModelCard) -> None:
    """Warn if a model's weights, of which the card has the hash, are not those that it was first adapted from."""
    metadata = metadata_of(unwrap_model(model).module)
    metadata.source_sha256 = metadata.source_sha256 or card.sha256
    if metadata.source_sha256 != card.sha256:
        _log.warning(
            "the model's weights have changed since it was first adapted, and now count as the source weights; build "
            "the model anew to start from the first ones"
        )


def log_context(context: RunContext) -> None:
    """Log what is about to run, and warn about surprising settings."""
    pipeline, card, options = context.pipeline, context.card, context.options
    method, every, size = pipeline.method, options.reset_every, options.batch_size
    if every is not None and every < size:
        _log.warning(
            "--reset-every %d is less than a batch of %d frames: the weights are reset before every batch", every, size
        )
    warn_of_guess(card)
    _warn_of_guard(context)
    if pipeline.centering.active and not method.model.biases:
        _log.info("the head has no bias to hold the offset of centred logits, so deltas are without it")
    names = method.model.weights.parameters
    _log.debug("%s adapts %d tensors, %s", context.method, len(names), ", ".join(names) or "none")
    _log.debug("preprocessing: %s", card.preprocessing)
    _log.debug("base weights: sha256 %s, on %s", card.sha256, card.device)
    if not method.norms_only and not options.save_full and not method.delta_refusal:
        megabytes = sum(tensor.nbytes for tensor in pipeline.committed[0].values()) / 1e6
        text = "%s changes every weight, so no %s is written; --save-full writes one of %.0f MB"
        _log.warning(text, context.method, DELTA, megabytes)


def _warn_of_guard(context: RunContext) -> None:
    """Warn of a guard action or an answer that was asked for, and that the method cannot have."""
    guard, preset = context.pipeline.guard, METHOD_TABLE[context.method].preset
    requested = context.options.guard or GuardOptions()
    actual = guard.options if guard else GuardOptions("off", "adapted")
    for option, value, default, used in (
        ("--guard", requested.action, preset.action, actual.action),
        ("--answer", requested.answer, preset.answer, actual.answer),
    ):
        if value not in (None, default, used):
            _log.warning("%s %s has no effect on --method %s", option, value, context.method)
