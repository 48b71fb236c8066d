"""Publish the adapted model during a run, as files that a server polls."""

from __future__ import annotations

import copy
import glob
import logging
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from remtta.errors import RemttaError, UsageError, check
from remtta.extensions import load_of_part
from remtta.files import check_can_hold, check_not_input, check_target, remove_leftovers, write_json, writing
from remtta.options import ModelOptions
from remtta.options.option import output_option
from remtta.runs.callbacks import BatchReport, Callback, PlannedRun
from remtta.runs.folder import OWN_FILES
from remtta.runs.reading import read_object, reading

if TYPE_CHECKING:
    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

_KEPT = 2  # versions: a server may still read the one before
_RETRY_S = 10.0  # after a failure
_LIST, _WHOLE = ".published.json", ".model.onnx"  # in a folder of versions: those by remtta, and the next one's file

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
        self._has_versions = path.suffix not in (".onnx", ".safetensors")
        if self._has_versions and path.suffix and not path.is_dir():
            raise UsageError(f"--publish {path} must be a folder, or end in .onnx or .safetensors")
        self._path, self._every, self._by_time = path, int(every.removesuffix("m")), every.endswith("m")
        self._as_delta = path.name.endswith("delta.safetensors")
        self._published = 0, 0  # `_state` of the last one
        self._problem = ""  # why the latest attempt failed

    @classmethod
    def from_options(cls, options: PublishOptions, run: PlannedRun) -> Self | None:
        if options.publish is None:
            return None
        publisher = cls(options.publish, options.publish_every)
        publisher._check_path(run.folder, run.source)
        return publisher

    def on_start(self, run: Run) -> None:
        """Raise UsageError if the run's model cannot be written to the path, or was read from there; remove what killed
        runs left there.
        """
        self._run, context = run, run.context
        self._published_at = self._tried_at = time.monotonic()
        if not context.pipeline.method.adapts or context.pipeline.method.delta_refusal:
            raise UsageError(f"{context.method} changes no weights that --publish could write")
        if self._has_versions or self._path.suffix == ".onnx":
            what = f"--publish {self._path}"
            self._save_onnx = load_of_part("remtta.formats.export:save_adapted_onnx", what)
            if not context.info.provider:
                load_of_part("remtta.formats.export:check_packages", what)("onnx")
        elif context.info.provider and not self._as_delta:
            raise UsageError(f"--publish {self._path}: an ONNX file is published as .onnx, or as its delta.safetensors")
        self._check_path(run.summary.output, context.stream.name)
        statistics = (context.pipeline.source_record or {}).get("path")
        start = context.start.path if context.start else None
        model = ModelOptions.from_arguments(**context.info.origin)
        self._inputs = [*model.files, start, statistics]
        check_not_input(self._path, "--publish", () if self._has_versions else self._inputs)
        if self._has_versions:
            remove_leftovers(self._path, (_LIST, _WHOLE))
            self._remove_old_versions()
        else:
            target = Path(os.path.realpath(self._path))
            local, _, place = (model.name or "").partition(":")
            if local == "local-dir" and target.is_relative_to(os.path.realpath(place)):
                raise UsageError(
                    f"--publish {self._path} is in the folder of the model, {place}; choose another folder"
                )
            remove_leftovers(target.parent, (glob.escape(target.name),))

    def _check_path(self, folder: Path, source: str) -> None:
        """Raise, before any work, if nothing can be written to the path, or it is a file of the run in this folder, or
        the folder of its frames.
        """
        if self._has_versions:
            target = Path(os.path.realpath(self._path))
            check_can_hold(target, "a folder to publish in", "--publish")
            if target == Path(os.path.realpath(source)):
                raise UsageError(f"--publish {self._path} is the folder of the frames; choose another folder")
            return
        check_target(self._path, "--publish", self._path.suffix, overwrite=True, made_by_then=folder)
        target = Path(os.path.realpath(self._path))
        check_can_hold(target.parent, "a folder to publish in", "--publish")
        if target.name in OWN_FILES and target.parent == Path(os.path.realpath(folder)):
            raise UsageError(f"--publish {self._path} is a file of the run; choose another name")

    def on_batch(self, report: BatchReport) -> None:
        """Publish the model if it is time to."""
        now, (updates, alarms) = time.monotonic(), self._state
        if self._problem and now - self._tried_at < _RETRY_S:
            return
        passed = (now - self._published_at) / 60 if self._by_time else updates - self._published[0]
        if passed >= self._every or alarms != self._published[1]:  # after an alarm, what harmed must not be served
            self._publish()

    def on_end(self, summary: RunSummary) -> None:
        """Publish the model of a whole run; after an alarm, however the run ended."""
        if summary.exit_reason == "completed" or self._state[1] != self._published[1]:
            self._publish(at_end=True)

    @property
    def _state(self) -> tuple[int, int]:
        """Number of updates, and of alarms after which the weights were restored."""
        return self._run.summary.num_updates, self._run.summary.num_alarms

    def _publish(self, *, at_end: bool = False) -> None:
        """Publish the model, unless it has not changed or the guard doubts it; log a failure, for another attempt."""
        pipeline, state = self._run.context.pipeline, self._state
        is_pending = pipeline.total_alarms != state[1]  # with --latency, weights are restored after this batch's report
        doubted = is_pending or (pipeline.guard is not None and pipeline.guard.state == "doubt")
        if state == self._published or doubted:
            return
        self._tried_at = time.monotonic()
        try:
            with writing(self._path):
                self._write_version() if self._has_versions else self._write(self._path)
        except RemttaError as error:
            harmful = ""
            if self._is_harmful:
                harmful = "; what was published before the guard's alarm is still there"
                if self._has_versions:
                    self._remove_old_versions(kept=1)  # the disk may be full
            problem, self._problem = self._problem, f"{error}{harmful}"
            if at_end or problem != self._problem:
                _log.warning("the model was not published: %s", self._problem)
            return
        if self._problem:
            _log.info("the model is published again: %s", self._path)
        self._published, self._published_at, self._problem = state, self._tried_at, ""
        _log.debug("published the model after %d updates: %s", state[0], self._path)

    @property
    def _is_harmful(self) -> bool:
        """True if what is published is from before the last alarm."""
        return self._state[1] != self._published[1] and self._path.exists()

    def _write_version(self) -> None:
        os.makedirs(os.path.realpath(self._path), exist_ok=True)  # also through a dangling link
        numbers = [int(each.name) for each in self._path.iterdir() if re.fullmatch("[1-9][0-9]{0,17}", each.name)]
        number = 1 + max(numbers, default=0)
        write_json(self._path / _LIST, {"versions": [*self._versions(), number]})
        self._write(self._path / _WHOLE)
        part = self._path / f".{number}"
        part.mkdir(exist_ok=True)
        os.replace(self._path / _WHOLE, part / "model.onnx")
        part.rename(self._path / str(number))
        self._remove_old_versions()

    def _versions(self) -> list[int]:
        """Return the numbers of the versions in the folder that remtta wrote, oldest first."""
        if not (path := self._path / _LIST).exists():
            return []
        with reading(path, UsageError):
            numbers = map(int, read_object(path)["versions"])
            return sorted(number for number in numbers if (self._path / str(number)).is_dir())

    def _remove_old_versions(self, kept: int = _KEPT) -> None:
        for number in self._versions()[:-kept]:
            old = self._path / str(number)
            if not any(Path(each).resolve().is_relative_to(old.resolve()) for each in self._inputs if each):
                shutil.rmtree(old, ignore_errors=True)

    def _write(self, path: Path) -> None:
        from remtta.deltas.delta import apply_delta, save_delta, save_weights
        from remtta.runs.record import delta_of

        context = self._run.context
        size, adapted = context.options.batch_size, context.pipeline.method.model
        delta = delta_of(context.info, context.method, context.config, size, context.pipeline.committed)
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
