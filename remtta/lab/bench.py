"""Measure every method's speed and memory on this machine, as multiples of a plain forward pass."""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from remtta.backbones.lookup import compile_blocks
from remtta.lab.bench_options import FORWARD, SUBJECTS, BenchOptions
from remtta.machine import processor_name
from remtta.methods.base import Method
from remtta.methods.build import build_method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.models.building import create
from remtta.models.loading import load, select_device
from remtta.models.peak_memory import keep_freed_memory, peak_bytes, resident_bytes, start_peak
from remtta.models.preprocessing import preprocessing_of
from remtta.models.timm_loader import TimmLoader
from remtta.options import GuardOptions, ModelOptions
from remtta.pipeline.build import assemble_pipeline
from remtta.pipeline.precision import Resolved, resolve_precision

MEMORY_STEPS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A subject's step on random images, with its model, method (if any), and the number of batches in a step."""

    step: Callable[[], object]
    model: nn.Module
    method: Method[MethodConfig] | None = None
    batches: int = 1

    @property
    def precision(self) -> Resolved:
        """The precision of its matrix products."""
        return "bf16" if self.method is not None and self.method.config.precision == "bf16" else "fp32"


@dataclass(frozen=True)
class Measurement:
    """One subject's results."""

    subject: str  # one of SUBJECTS
    precision: Resolved
    seconds: float  # median duration of a batch
    forwards: float  # the same as a multiple of a plain fp32 forward pass
    images_per_s: float
    peak_bytes: int | None  # peak memory of two steps beyond that of the loaded model, if measured
    cpu_s_per_1000: float  # CPU time over all cores for 1,000 images, in seconds


def run_bench(options: BenchOptions) -> list[Measurement]:
    """Measure all subjects, round by round. Raise UsageError if the model or device does not exist; ModelError if a
    method cannot adapt the model.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    default = options.model.loader.default_method
    subjects = (
        (FORWARD, "source", default) if default != "remtta" and options.subjects == SUBJECTS else options.subjects
    )
    names = [FORWARD, *(name for name in subjects if name != FORWARD)]
    prepared = {name: prepare(name, options) for name in names}
    device = select_device(options.device)
    for name, subject in prepared.items():
        _log.info("warming up %s", name)
        subject.step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(1, options.repeats + 1):
        _log.info("round %d of %d", number, options.repeats)
        for name, subject in prepared.items():
            times[name].append(_timed(subject, device))
    precisions = {name: subject.precision for name, subject in prepared.items()}
    del prepared
    medians = {name: tuple(map(statistics.median, zip(*timings, strict=True))) for name, timings in times.items()}
    plain_s, _ = medians[FORWARD]
    return [
        Measurement(
            subject=name,
            precision=precisions[name],
            seconds=seconds,
            forwards=seconds / plain_s,
            images_per_s=options.batch_size / seconds,
            peak_bytes=measure_peak(name, replace(options, precision=precisions[name])) if options.memory else None,
            cpu_s_per_1000=1000 * cpu_s / options.batch_size,
        )
        for name, (seconds, cpu_s) in medians.items()
    ]


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
def prepare(subject: str, options: BenchOptions) -> Prepared:
    """Build a subject and its step on random images. Raise UsageError if the model does not exist; CheckpointError if
    the checkpoint does not fit it.
    """
    device = select_device(options.device)
    torch.default_generator.manual_seed(options.seed)
    model = _model(options.model, device).eval().to(device)
    if options.compile and subject != FORWARD:
        compile_blocks(model)
    height, width = preprocessing_of(model).input_size
    images = torch.randn(options.batch_size, 3, height, width).to(device)
    if subject == FORWARD:
        return Prepared(torch.no_grad()(lambda: model(images)), model)
    settings: dict[str, object] = {"precision": options.precision}
    if options.mask_ratios and subject in ("rem", "remtta"):
        settings["mask_ratios"] = options.mask_ratios
    config = method_config(subject, settings, batch_size=options.batch_size)
    method = build_method(subject, model, config)
    resolve_precision(method, subject)
    preset = METHOD_TABLE[subject].preset
    pipeline = assemble_pipeline(method, GuardOptions(preset.action, preset.answer))

    def step() -> None:
        for _ in range(config.adapt_every):
            pipeline.predict(images)
            pipeline.learn()

    return Prepared(step, model, method, config.adapt_every)


def _model(options: ModelOptions, device: torch.device) -> nn.Module:
    """Build the model, with random weights if it is one of timm without a checkpoint."""
    if options.checkpoint is not None or not isinstance(options.loader, TimmLoader):
        return load(options, device=device)
    model: Any = create(options.name or "", options, pretrained=False)
    if options.input_size is not None:
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *options.input_size)}
    return model


def _timed(subject: Prepared, device: torch.device) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of a batch."""
    _wait(device)
    cpu_s, started = time.process_time(), time.perf_counter()
    subject.step()
    _wait(device)
    return (time.perf_counter() - started) / subject.batches, (time.process_time() - cpu_s) / subject.batches


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peak(subject: str, options: BenchOptions) -> int:
    """Return the peak memory of a few steps beyond that of the loaded model, in bytes.

    It is measured in a new process, since this one's peak includes the other subjects.
    """
    _log.info("measuring the memory of %s", subject)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_peak_here, (subject, options))


def _measure_peak_here(subject: str, options: BenchOptions) -> int:
    keep_freed_memory()  # as the command line does
    if options.threads:
        torch.set_num_threads(options.threads)
    device = select_device(options.device)
    step = prepare(subject, options).step
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    start_peak(device)
    for _ in range(MEMORY_STEPS):
        step()
    return max(0, peak_bytes(device) - before)


def as_json(
    options: BenchOptions, measured: Sequence[Measurement], environment: Mapping[str, object]
) -> dict[str, object]:
    """Return options, environment and measurements, ready for JSON."""
    model, bench_options = options.model, asdict(options)
    del bench_options["model"]
    model_options = {
        "model": model.name,
        "checkpoint": model.checkpoint and str(model.checkpoint),
        **{name: getattr(model, name) for name in ("use_ema", "num_classes", "model_kwargs", "input_size")},
    }
    return {
        "options": {**model_options, **bench_options},
        "environment": {**environment, **processor()},
        "measurements": [asdict(measurement) for measurement in measured],
    }


def processor() -> dict[str, str | int]:
    """Return the CPU's model, its number of cores, and the instruction set used by PyTorch."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count() or 1,
        "used_by_torch": torch.backends.cpu.get_cpu_capability(),
    }
