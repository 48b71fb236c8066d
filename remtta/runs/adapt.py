"""The main job: read a stream, predict, adapt, and write down what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from remtta.bench.fitting import fitting_micro_batch
from remtta.deltas import DELTA
from remtta.deltas.delta import Delta, check_base
from remtta.errors import UsageError
from remtta.guard.accuracy import WINDOW, Calibration, Estimator
from remtta.guard.guard import guarded
from remtta.guard.smoothing import Smoother
from remtta.methods.gradient import GradientMethod
from remtta.methods.method import Method
from remtta.methods.registry import build_method
from remtta.methods.settings import MethodConfig
from remtta.methods.settings.names import PRESET
from remtta.methods.settings.presets import PRESETS
from remtta.methods.source_data import FEW_IMAGES, check_source_data, clean_batches, learn_from_source
from remtta.models.card import ModelCard, card_of
from remtta.options import RunOptions
from remtta.runs.adapter import Adapter
from remtta.runs.folder import RECORD, check_folder, check_writable, default_folder
from remtta.runs.health import HealthFile, check_health_path, vitals
from remtta.runs.interrupts import Interrupts
from remtta.runs.reading import read_record
from remtta.runs.record import Plan
from remtta.runs.run import Run
from remtta.runs.summary import RunSummary
from remtta.streams.sources import Stream, open_stream, shown_counts

__all__ = ["RunSummary", "adapt_stream"]

_log = logging.getLogger("remtta")


def adapt_stream(
    model: nn.Module,
    source: Stream | str | Path | Iterable[str | Path],
    output: str | Path | None = None,
    *,
    method: str = "rem",
    config: MethodConfig | None = None,
    options: RunOptions | None = None,
    delta: Delta | None = None,
    source_data: str | Path | None = None,
    echo: BinaryIO | None = None,
    health: str | Path | None = None,
    on_batch: Callable[[RunSummary], None] | None = None,
    interrupts: Interrupts | None = None,
) -> RunSummary:
    """Predict every frame of a stream, and adapt the model to it on the way.

    Writes `predictions.jsonl` (one line per frame, in order), `delta.safetensors`
    and `run.json` into the output folder. A source that yields no frame at all
    leaves nothing behind; of a list of paths, which may be empty, that is no error
    unless `require_frames` says so. Of a method that changes every weight a delta is
    written only with `save_full`.

    Args:
        model: A timm classifier, as from `load_model`; adapted in place.
        source: A stream, anything `open_stream` takes, or paths.
        output: Folder for the results; by default `runs/<UTC time>`.
        method: Name of the adaptation method: "rem", or "source" for none.
        config: The method's settings; those that `remtta adapt` has without options if None.
        options: How the stream is run.
        delta: Start from these adapted weights.
        source_data: Clean source images (a folder), or the statistics of some (a file), for
            methods that learn from them first, and for the estimate.
        echo: A binary stream that gets the prediction lines as well.
        health: A JSON file that is replaced every few seconds with how the run is.
        on_batch: Called after every batch with the counts so far.
        interrupts: Turns signals into a clean stop.

    Returns:
        The counts and the reason why the run ended. A signal or a closed pipe
        ends it early without an exception.

    Raises:
        UsageError: If the source does not exist, the folder holds another run, source images are missing,
            or `save_full` asks for what the method cannot save.
        StreamError: If the source fails, or yields no readable frame.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    options, interrupts = options or RunOptions(), interrupts or Interrupts()
    torch.manual_seed(options.seed)
    config = config or PRESETS[PRESET].config(method, {}, batch_size=options.batch_size)
    stream = source if isinstance(source, Stream) else open_stream(source)
    folder = default_folder() if output is None else Path(output)
    if health is not None:
        check_health_path(Path(health), folder)
    if options.resume:
        check_writable(folder)
    else:
        check_folder(folder, overwrite=options.overwrite)
    card = card_of(model)
    adapter = build_method(method, model, config)
    _check_method(adapter, method, source_data, options)
    learned = None
    if source_data is not None and adapter.needs_source:
        learned = learn_from_source(adapter, model, source_data, method=method, config=config, wait=interrupts.check)
    estimator = _estimator(adapter, card, source_data, options, folder, interrupts.check)
    if options.max_memory is not None and config.micro_batch is None:
        config = _within_memory(adapter, card, config, folder, options)
    if delta is not None:
        check_base(delta, card.sha256)
        adapter.load_delta(delta.tensors, delta.updates)
    _tell(adapter, method, card, options)
    smoother = Smoother(card.num_classes) if options.smooth == "auto" else None
    guarded_adapter = Adapter(adapter, guarded(adapter, options.guard, config), smoother, estimator)
    plan = Plan(card, guarded_adapter, method, config, options, stream, delta, learned)
    run = Run(plan, folder, pipe=echo, on_batch=on_batch, interrupts=interrupts)
    with contextlib.ExitStack() as during:
        if health is not None:
            during.enter_context(
                contextlib.closing(HealthFile(Path(health), lambda: vitals(plan, run.summary, run.record)))
            )
        summary = run.execute()
    if stream.left_out:
        _log.info("left out of %s: %s", stream.name, shown_counts(stream.left_out))
    return summary


def _check_method(adapter: Method, name: str, source_data: str | Path | None, options: RunOptions) -> None:
    """Refuse a method that a stream cannot run, or options that it has no use for."""
    if adapter.needs_labels:
        raise UsageError(f"{name} learns from labels, which a stream has none of; use it in remtta eval")
    if options.save_full and adapter.delta_refusal:
        raise UsageError(f"{adapter.delta_refusal}, so there is nothing for --save-full; leave it out")
    check_source_data([name], source_data, calibrates=options.estimate is not None)


def _estimator(
    adapter: Method,
    card: ModelCard,
    source_data: str | Path | None,
    options: RunOptions,
    folder: Path,
    wait: Callable[[], None],
) -> Estimator | None:
    """What estimates the accuracy, if that is asked for; calibrated as the run was that it goes on with."""
    if options.estimate is None:
        return None
    record = (read_record(folder / RECORD) if options.resume and (folder / RECORD).exists() else {}).get("accuracy")
    if record is not None:
        calibration = Calibration(**record["calibration"])
    elif source_data is None:
        calibration = Calibration.unseen(options.estimate, card.num_classes)
    else:
        with contextlib.closing(clean_batches(source_data, card.preprocessing, card.device, WINDOW, wait)) as batches:
            logits = torch.cat([adapter.predict_source(batch).float().cpu() for batch in batches])
        if len(logits) < FEW_IMAGES:
            _log.warning("the estimate is calibrated on %d image(s) only; give it some hundreds", len(logits))
        calibration = Calibration.seen(options.estimate, logits)
    return Estimator(calibration, card.num_classes, options.expire_below)


def _tell(adapter: Method, name: str, card: ModelCard, options: RunOptions) -> None:
    """Say what is about to run, and warn of what a user may not expect."""
    every, size = options.reset_every, options.batch_size
    if every is not None and every < size:
        _log.warning("a reset every %d frames, with %d frames per update, is one before every batch", every, size)
    names = adapter.adapted_names
    _log.debug("%s adapts %d tensors, %s", name, len(names), ", ".join(names) or "none")
    _log.debug("preprocessing: %s", card.preprocessing)
    _log.debug("base weights: sha256 %s, on %s", card.sha256, card.device)
    if not adapter.norms_only and not options.save_full and not adapter.delta_refusal:
        megabytes = sum(tensor.nbytes for tensor in adapter.committed[0].values()) / 1e6
        _log.warning(
            "%s changes every weight, so no %s is written; --save-full writes one, of %.0f MB", name, DELTA, megabytes
        )


def _within_memory(
    adapter: Method, card: ModelCard, config: MethodConfig, folder: Path, options: RunOptions
) -> MethodConfig:
    """The config with a micro-batch that keeps to `max_memory`; the one the run began with, where it goes on."""
    assert options.max_memory is not None
    if not isinstance(adapter, GradientMethod):
        _log.warning("--max-memory chooses the micro-batch of methods that train weights, and changes nothing here")
        return config
    if options.resume and (folder / RECORD).exists():
        size = read_record(folder / RECORD).get("method", {}).get("micro_batch")
    else:
        size = fitting_micro_batch(adapter, card.preprocessing.input_size, options.batch_size, options.max_memory)
    if size is None:
        return config
    adapter.micro_batch = size
    _log.info("--max-memory: %d images at a time", size)
    return dataclasses.replace(config, micro_batch=size)
