"""Publish the adapted model during a run, as files that a server polls."""

from __future__ import annotations

import copy
import logging
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from remtta.errors import RemttaError, UsageError, check
from remtta.extensions import load_of_part
from remtta.files import check_can_hold, writing
from remtta.options.option import output_option
from remtta.runs.callbacks import BatchReport, Callback, PlannedRun

if TYPE_CHECKING:
    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

_KEPT = 2  # versions: a server may still read the one before

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class PublishOptions:
    """The published model."""

    publish: Annotated[
        Path | None,
        output_option(
            "Replace this file with the adapted model now and then: .onnx, .safetensors, or delta.safetensors; or add "
            "versions to this folder of a Triton model.",
            metavar="PATH",
            more="onnx.md",
        ),
    ] = None
    publish_every: Annotated[
        str, output_option("Time between publications: 10m, or a number of updates.", metavar="N|Nm")
    ] = "10m"


class ModelPublisher(Callback):
    """Writes the adapted model now and then, whole or not at all, and never while the guard doubts it.

    Args:
        path: A file: `.onnx`, `.safetensors` for a checkpoint, or `delta.safetensors`; or the folder of a model in a
            repository of Triton, for versions of `model.onnx` in numbered folders.
        every: Number of updates, or of minutes: "10m".

    Raises:
        UsageError: If the path or the number is none of these.
    """

    options = PublishOptions

    def __init__(self, path: Path, every: str = "10m") -> None:
        valid = re.fullmatch(r"[1-9]\d*m?", every) is not None
        check(valid, "--publish-every", every, "a number of updates (200) or of minutes (10m)")
        if path.suffix not in ("", ".onnx", ".safetensors"):
            raise UsageError(f"--publish {path} must be a folder, or end in .onnx or .safetensors")
        check_can_hold(path.parent, "a folder to publish in", "--publish")
        self._path, self._every, self._by_time = path, int(every.removesuffix("m")), every.endswith("m")
        self._as_delta = path.name.endswith("delta.safetensors")
        self._published = 0, 0  # `_state` of the last one
        self._versions: list[Path] = []  # oldest first

    @classmethod
    def from_options(cls, options: PublishOptions, run: PlannedRun) -> Self | None:
        return None if options.publish is None else cls(options.publish, options.publish_every)

    def on_start(self, run: Run) -> None:
        """Raise UsageError if the run's model cannot be written to the path."""
        self._run, context, self._at = run, run.context, time.monotonic()  # when it was last published
        if not context.pipeline.method.adapts or context.pipeline.method.delta_refusal:
            raise UsageError(f"{context.method} changes no weights that --publish could write")
        if self._path.suffix != ".safetensors":
            self._save_onnx = load_of_part("remtta.formats.export:save_adapted_onnx", f"--publish {self._path}")
        elif context.info.provider and not self._as_delta:
            raise UsageError(f"--publish {self._path}: an ONNX file is published as .onnx, or as its delta.safetensors")

    def on_batch(self, report: BatchReport) -> None:
        """Publish the model if it is time to."""
        minutes, (updates, alarms) = (time.monotonic() - self._at) / 60, self._state
        passed = minutes if self._by_time else updates - self._published[0]
        if passed >= self._every or alarms != self._published[1]:  # after an alarm, what harmed must not be served
            self._publish()

    def on_end(self, summary: RunSummary) -> None:
        """Publish the model of a whole run."""
        if summary.exit_reason == "completed":
            self._publish()

    @property
    def _state(self) -> tuple[int, int]:
        """Number of updates and of alarms."""
        return self._run.summary.num_updates, self._run.context.pipeline.total_alarms

    def _publish(self) -> None:
        """Publish the model, unless it has not changed or the guard doubts it; a failure is only logged."""
        guard, state = self._run.context.pipeline.guard, self._state
        if state == self._published or (guard is not None and guard.verdict == "doubt"):
            return
        self._published, self._at = state, time.monotonic()
        try:
            with writing(self._path):
                self._write(self._path) if self._path.suffix else self._write_version()
            _log.debug("published the model after %d updates: %s", state[0], self._path)
        except RemttaError as error:
            _log.warning("the model was not published: %s", error)

    def _write_version(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(each.name) for each in self._path.iterdir() if each.name.isdigit()), default=0)
        part = self._path / f".{number}"
        part.mkdir(exist_ok=True)
        self._write(part / "model.onnx")
        self._versions.append(part.rename(self._path / str(number)))
        for old in self._versions[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, path: Path) -> None:
        from remtta.deltas.delta import apply_delta, save_delta, save_weights
        from remtta.runs.manifest import delta_of

        context, frames = self._run.context, self._run.summary.progress.frames_in_delta
        size, adapted = context.options.batch_size, context.pipeline.method.model
        delta = delta_of(context.info, context.method, context.config, size, context.pipeline.committed, frames)
        if self._as_delta:
            save_delta(path, delta)
            return
        with adapted.weights.at_source():
            model = copy.deepcopy(adapted.backbone.module).cpu()
        apply_delta(model, delta)
        if path.suffix == ".onnx":
            self._save_onnx(model, delta, path)
        else:
            save_weights(path, model)
