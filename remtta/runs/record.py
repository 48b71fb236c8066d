"""`run.json`: everything needed to repeat a run, and its outcome."""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from operator import call
from typing import Any

import torch

from remtta._version import __version__
from remtta.deltas.delta import Delta
from remtta.errors import UsageError, without_password
from remtta.files import from_json, to_json, write_json
from remtta.machine import processor_name
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.renamed import current_record
from remtta.models.info import ModelInfo
from remtta.models.tensor_files import json_sha256
from remtta.options import GuardOptions, RunOptions
from remtta.options.option import fixed_fields
from remtta.options.run_options import RENAMED
from remtta.pipeline.accuracy import Estimator
from remtta.pipeline.centering import LogitCentering
from remtta.pipeline.guard import guard_for
from remtta.pipeline.pipeline import Adaptation, Pipeline
from remtta.runs.folder import RECORD, check_same_settings
from remtta.runs.latencies import Latencies
from remtta.runs.loop import Counts, RunExclusively
from remtta.runs.summary import RunSummary
from remtta.streams.sources import Stream


@dataclass(frozen=True)
class RunContext:
    """The inputs of a run of `adapt`, fixed before its first frame."""

    info: ModelInfo
    pipeline: Pipeline  # of that model
    method: str
    options: RunOptions
    stream: Stream  # source of the frames
    start: Delta | None = None  # the delta from which it starts, if any
    decoding_threads: int | None = None  # if chosen, as for many streams
    earlier: Mapping[str, Any] | None = None  # the record of the run that it resumes, if any
    run_exclusively: RunExclusively = call

    @property
    def config(self) -> MethodConfig:
        """The method's settings."""
        return self.pipeline.method.config


def delta_of(info: ModelInfo, method: str, config: MethodConfig, batch_size: int, committed: Adaptation) -> Delta:
    """Return the delta of an adaptation, with its origin."""
    return Delta(
        tensors={name: tensor.cpu() for name, tensor in committed.delta.items()},
        model=info.name,
        base_sha256=info.sha256,
        method=method,
        hyperparameters={**config.used(), "batch_size": batch_size},
        frames=committed.num_frames,
        updates=committed.num_updates,
        model_options=info.options,
        preprocessing=info.preprocessing.as_dict(),
    )


class RunRecord:
    """Writes `run.json`."""

    def __init__(self, context: RunContext, summary: RunSummary) -> None:
        self._context, self._summary = context, summary
        self.run = uuid.uuid4().hex  # unique name, kept when the run resumes
        self.started = datetime.now(UTC).isoformat(timespec="seconds")  # when the run began
        self.latencies = Latencies()  # of predictions
        self.steps = Latencies()  # of batches, including their updates
        self.reads, self.decodes = Latencies(), Latencies()  # of frames; preprocessing counts as decoding
        self._environment = environment(context.info.device)

    def resume_from(self, earlier: Mapping[str, Any]) -> None:
        """Continue an earlier run's record."""
        timing = earlier.get("timing", {})
        self.run = earlier.get("run") or self.run
        self.started = timing.get("started", self.started)
        self.latencies.before = timing.get("latency_ms")
        if live := self._context.stream.live_source:
            live.backlog.dropped += self._summary.progress.dropped

    @property
    def live_counts(self) -> dict[str, int]:
        """The counts that only live sources have."""
        progress = self._summary.progress
        return {"dropped": progress.dropped, "gaps": progress.gaps} if self._context.stream.live else {}

    def write(self) -> None:
        """Replace the file."""
        write_json(self._summary.output / RECORD, self.content())

    def content(self) -> dict[str, Any]:
        """Return the content of the file for the run so far."""
        context, summary, progress = self._context, self._summary, self._summary.progress
        live = context.stream.live_source
        return {
            "run": self.run,
            "exit_reason": summary.exit_reason,
            "resumed": summary.num_resumed,
            "counts": {
                "frames": summary.num_frames,
                "predicted": summary.num_predicted,
                "skipped": summary.num_skipped,
                "updates": summary.num_updates,
                "not_adapted": progress.not_adapted,
                **({"smoothed": progress.smoothed} if summary.smooths else {"in_order": summary.in_order}),
                **self.live_counts,
            },
            "timing": {
                "started": self.started,
                "seconds": round(summary.seconds, 3),
                "images_per_s": round(summary.images_per_s, 2),
                "latency_ms": self.latencies.percentiles_ms(),  # of batches, since the run began or resumed
            },
            "source": {
                "name": context.stream.name,
                "kind": context.stream.kind,
                "num_frames": context.stream.num_frames,
                **{name: getattr(context.stream.options, name) for name in ("limit", "frame_stride", "sort")},
                **({"left_out": dict(context.stream.left_out)} if context.stream.left_out else {}),
                **({"live": dataclasses.asdict(live.options)} if live else {}),
            },
            "model": {
                **context.info.origin,
                **({"provider": context.info.provider} if context.info.provider else {}),
                "num_classes": context.info.num_classes,
                "base_sha256": context.info.sha256,
                "labels_sha256": json_sha256(context.info.labels),
                "start_delta": None if context.start is None else context.start.origin,
            },
            "preprocessing": context.info.preprocessing.as_dict(),
            "method": {"name": context.method, **context.config.used(), "batch_size": context.options.batch_size},
            "source_statistics": context.pipeline.source_record,
            "guard": guard_record(context.pipeline, progress),
            "centering": centering_record(context.pipeline.centering),
            "accuracy": estimator.record() if (estimator := context.pipeline.find(Estimator)) else None,
            "options": {
                key: value for key, value in dataclasses.asdict(context.options).items() if key != "batch_size"
            },
            "adapted": list(context.pipeline.method.model.weights.parameters),
            "environment": self._environment,
        }


def guard_record(pipeline: Pipeline, counts: Counts) -> dict[str, Any] | None:
    """Return the guard's part of a record, or None without a guard."""
    if pipeline.guard is None:
        return None
    lead = pipeline.guard.status.lead
    return {
        "alarms": pipeline.total_alarms,
        "retired": pipeline.disabled,
        **({"lead": round(lead, 4)} if math.isfinite(lead) else {}),
        "answered_by_source": counts.by_source,
        "answered_by_both": counts.by_both,
    }


def centering_record(centering: LogitCentering) -> dict[str, Any] | None:
    """Return the centering's part of a record, or None without any."""
    if not centering.active:
        return None
    few = round(float(centering.class_fraction_kept), 4)
    return {"few_classes": few, "uncentered": centering.uncentered, "times_uncentered": centering.times_uncentered}


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, machine and command line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {
        "remtta": __version__,
        "torch": torch.__version__,
        "timm": version("timm"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "command": [without_password(part) for part in sys.argv],
    }


def check_same_run(earlier: Mapping[str, Any], now: Mapping[str, Any], method: Method[MethodConfig]) -> None:
    """Raise UsageError if the records of a run and of now differ in a setting that changes the method's predictions."""
    before, name = (current_record(record.get("method") or {}).get("name", "") for record in (earlier, now))
    if before != name:
        raise UsageError(f"--resume needs the method that the run began with: it was {before}, is {name}")
    begun, settings = _settings(earlier), _settings(from_json(to_json(now)))
    if begun["labels_sha256"] is None:  # the record of a version without it
        del begun["labels_sha256"], settings["labels_sha256"]
    for each in (begun, settings):
        each["guard"] = _used_guard(each["guard"], method)
    if begun["method"].get("batch_size") != settings["method"].get("batch_size"):  # others follow from it
        begun, settings = ({"batch_size": each["method"].get("batch_size")} for each in (begun, settings))
    check_same_settings(begun, settings)


def _used_guard(guard: Mapping[str, Any] | None, method: Method[MethodConfig]) -> dict[str, Any] | None:
    """Return a record's options of the guard with the action and answer that take effect; None if it does nothing."""
    used = guard and guard_for(method, GuardOptions(guard.get("action"), guard.get("answer")))
    return {**guard, "action": used.options.action, "answer": used.options.answer} if guard and used else None


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    model, options, method = (record.get(name) or {} for name in ("model", "options", "method"))
    removed = {name: value for name, value in options.items() if value and not hasattr(RunOptions, name)}
    method = current_record(method)
    if method.get("precision") == "auto":  # in the record of an earlier version, where it was fp32
        method = {**method, "precision": "fp32"}
    return {
        **removed,
        "base_sha256": model.get("base_sha256"),
        "labels_sha256": model.get("labels_sha256"),
        "start_delta": (start := model.get("start_delta")) and {**start, "path": None},
        "preprocessing": record.get("preprocessing"),
        "source_statistics": (record.get("source_statistics") or {}).get("tensors_sha256"),
        "method": method,
        **{name: options.get(name, default) for name, default in fixed_fields(RunOptions).items() if name != "guard"},
        "guard": (guard := options.get("guard")) and {RENAMED.get(name, name): guard[name] for name in guard},
    }
