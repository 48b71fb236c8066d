"""Adapt a model to one stream: read, predict, adapt, write the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from remtta.adapt.image_inputs import warn_of_guess
from remtta.deltas import DELTA
from remtta.deltas.delta import Delta
from remtta.errors import UsageError, counted
from remtta.extensions import load_of_part
from remtta.interrupts import Interrupts
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.chosen import default_method
from remtta.methods.table import METHOD_TABLE
from remtta.models.info import ModelInfo, model_info, warn_of_change
from remtta.options import GuardOptions, RunOptions
from remtta.pipeline.build import AdaptationConfig, build_pipeline
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.folder import RECORD, check_folder, run_folder
from remtta.runs.pipe import RowPipe
from remtta.runs.reading import read_record
from remtta.runs.record import RunContext
from remtta.runs.run import Run
from remtta.runs.summary import RunSummary
from remtta.streams.listing import log_ignored
from remtta.streams.sources import Source, Stream, open_stream

_FEWEST_UPDATES = 4
"""Updates of the shortest stream that was measured: 64 frames in batches of 16 (docs/results.md#deployment)."""

_log = logging.getLogger("remtta")


def adapt_stream(
    model: nn.Module,
    source: Stream | Source,
    output: str | Path | None = None,
    *,
    method: str | None = None,
    config: MethodConfig | Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
    delta: Delta | None = None,
    source_data: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    interrupts: Interrupts | None = None,
    **hooks: Any,
) -> RunSummary:
    """Predict every frame of a stream, and adapt the model to the frames.

    Writes `predictions.jsonl` (one line per frame, in order), `delta.safetensors` and `run.json` into the output
    folder. A source without frames writes nothing; for a list of paths this is not an error. If the method changes
    every weight, a delta is only written with `save_full`.

    Args:
        model: A classifier, as returned by `load_model`; adapted in place, so build it anew for another run.
        source: A stream, anything `open_stream` accepts, or paths.
        output: Folder for the results; by default `runs/<UTC time>`.
        method: Name of the adaptation method, e.g. "rem" (as published) or "source" (no adaptation); by default
            "remtta", or "fast" for an ONNX file.
        config: The settings that differ from the method's defaults, such as {"lr": 0.005}; or a whole config, such as
            `REMConfig()`, which holds the paper's values, not those of "remtta".
        options: Options of the run.
        delta: Start from these adapted weights.
        source_data: Clean source images (a folder), or statistics computed from some (a file), for methods that need
            them, and for the accuracy estimate.
        callbacks: See the run, in this order: each batch's frames and rows, and its end.
        interrupts: Turns signals into a clean stop while it is entered (`with Interrupts() as interrupts`). Without it,
            a KeyboardInterrupt is raised once everything is saved, and other signals end the program.
        hooks: The keywords of 0.5 that `callbacks` replaces, for one release.

    Returns:
        The counts and the reason why the run ended. A closed pipe, or a signal that `interrupts` receives, ends it
        early without an exception.

    Raises:
        UsageError: If the source does not exist, the folder holds another run, source images are missing, or
            `save_full` is set for a method that cannot save a delta.
        StreamError: If the source fails, or yields no readable frame.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    options, interrupts = options or RunOptions(), interrupts or Interrupts()
    if not isinstance(options, RunOptions):
        raise UsageError(f"options is a remtta.RunOptions, got {options!r:.80}")
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise UsageError(f"callbacks is a list of remtta.Callback objects, got {callbacks!r:.80}")
    if hooks:
        callbacks = [*callbacks, *_callbacks_of_hooks(**hooks)]
    stream = source if isinstance(source, Stream) else open_stream(source)
    with run_folder(output) as folder:
        if options.realtime and stream.num_frames is not None:
            raise UsageError(f"--realtime needs the times of a video or a live source, and {stream.name} has none")
        check_folder(folder, overwrite=options.overwrite, resume=options.resume)
        info = model_info(model)
        warn_of_change(model, info)
        setup = AdaptationConfig(method or default_method(info.name), config, options, delta, source_data)
        context = prepare_run(model, info, stream, folder, setup, interrupts.check)
        log_context(context)
        summary = Run(context, folder, interrupts, callbacks).execute()
    log_ignored(stream.name, stream.left_out)
    learned = context.pipeline.method.keeps_updates and summary.num_updates and delta is None
    if learned and summary.exit_reason == "completed":
        _hint_at_few_updates(summary, options.batch_size)
    return summary


def _hint_at_few_updates(summary: RunSummary, batch_size: int) -> None:
    """Log that a run made too few updates to gain much, if that is so."""
    if 1 < summary.num_predicted <= batch_size:
        _log.info("all frames fit in one batch, so none was predicted after an update; use a smaller --batch-size")
    elif batch_size > 1 and summary.num_updates < _FEWEST_UPDATES:
        _log.info(
            "only %s on %d frames, and gains were measured from %d on; use more frames, or a smaller --batch-size",
            counted(summary.num_updates, "update"),
            summary.num_predicted,
            _FEWEST_UPDATES,
        )


class _Hooks(Callback):
    """Calls the functions that the keywords `viewers` and `on_batch` of 0.5 took."""

    def __init__(self, viewers: Sequence[Callable[..., object]], summary: Callable[..., object] | None) -> None:
        self._viewers, self._summary = viewers, summary

    def on_batch(self, report: BatchReport) -> None:
        for view in self._viewers:
            view(report)
        if self._summary:
            self._summary(report.summary)


def _callbacks_of_hooks(
    echo: Any = None, health: Any = None, metrics: Any = None, on_batch: Any = None, viewers: Any = (), **others: Any
) -> list[Callback]:
    """Return callbacks that do what the keywords of 0.5 did; raise UsageError for any other."""
    if others:
        named = ", ".join(others)
        raise UsageError(
            f"adapt_stream has no {named}; settings go to config={{...}}, the rest to options=RunOptions(...)"
        )
    _log.warning("adapt_stream now takes callbacks=[...]; echo, health, metrics, on_batch and viewers will be removed")
    made = [RowPipe(echo)] if echo else []
    if health:
        made.append(load_of_part("remtta.deployment.health:Health", "health=...")(health))
    return [*made, *([metrics] if metrics else []), _Hooks(viewers, on_batch)]


def prepare_run(
    model: nn.Module, info: ModelInfo, stream: Stream, folder: Path, config: AdaptationConfig, wait: Callable[[], None]
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
    pipeline = build_pipeline(model, info, config, wait, earlier)
    return RunContext(info, pipeline, config.method, config.options, stream, config.delta, earlier=earlier)


def log_context(context: RunContext) -> None:
    """Log what is about to run, and warn about surprising settings."""
    pipeline, info, options = context.pipeline, context.info, context.options
    method, every, size = pipeline.method, options.reset_every, options.batch_size
    if every is not None and every < size:
        _log.warning(
            "--reset-every %d is less than a batch of %d frames: the weights are reset before every batch", every, size
        )
    warn_of_guess(info.guessed)
    guard, preset = options.guard or GuardOptions(), METHOD_TABLE[context.method].preset
    used = pipeline.guard.options if pipeline.guard else GuardOptions("off", "adapted")
    for option, value, others in (
        ("--guard", guard.action, (None, preset.action, used.action)),
        ("--answer", guard.answer, (None, preset.answer, used.answer)),
    ):
        if value not in others:
            _log.warning("%s %s has no effect on --method %s", option, value, context.method)
    if pipeline.centering.active and not method.model.biases:
        _log.info("the head has no bias to hold the offset of centered logits, so deltas are without it")
    names = method.model.weights.parameters
    _log.debug("%s adapts %d tensors, %s", context.method, len(names), ", ".join(names) or "none")
    _log.debug("preprocessing: %s", info.preprocessing)
    _log.debug("base weights: sha256 %s, on %s", info.sha256, info.device)
    if not method.norms_only and not options.save_full and not method.delta_refusal:
        megabytes = sum(tensor.nbytes for tensor in pipeline.committed.delta.values()) / 1e6
        text = "%s changes every weight, so no %s is written; --save-full writes one of %.0f MB"
        _log.warning(text, context.method, DELTA, megabytes)
