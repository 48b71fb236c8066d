"""Publish the adapted model during a run, as files that a server polls."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from remtta.errors import RemttaError, UsageError, check
from remtta.files import check_can_hold, writing

if TYPE_CHECKING:
    from remtta.runs.run import Run

_KEPT = 2  # versions: a server may still read the one before

_log = logging.getLogger("remtta")


class ModelPublisher:
    """Writes the adapted model now and then, whole or not at all, and never while the guard doubts it.

    Args:
        path: A file: `.onnx`, `.safetensors` for a checkpoint, or `delta.safetensors`; or the folder of a model in a
            repository of Triton, for versions of `model.onnx` in numbered folders.
        every: Number of updates, or of minutes: "10m".

    Raises:
        UsageError: If the path or the number is none of these.
    """

    def __init__(self, path: Path, every: str = "10m") -> None:
        number = re.fullmatch(r"(\d+)(m?)", every)
        check(number is not None and int(number[1]) > 0, "--publish-every", every, "updates (200) or minutes (10m)")
        assert number is not None
        self._path, self._every, self._by_time = path, int(number[1]), bool(number[2])
        if path.suffix not in ("", ".onnx", ".safetensors"):
            raise UsageError(f"--publish {path} must be a folder, or end in .onnx or .safetensors")
        check_can_hold(path if path.suffix == "" else path.parent, "a folder to publish in", "--publish")
        self._published, self._at = 0, time.monotonic()  # updates in the last one, and when
        self._versions: list[Path] = []

    def follow(self, run: Run) -> None:
        """Publish this run's model; raise UsageError if it cannot be written so."""
        from remtta.models.onnx_model import OnnxClassifier

        self._run, method = run, run.context.pipeline.method
        onnx = isinstance(method.model.backbone.module, OnnxClassifier)
        if self._path.suffix == ".safetensors" and onnx and not self._as_delta:
            raise UsageError(f"--publish {self._path}: an ONNX file is published as .onnx, or as its delta.safetensors")
        if method.delta_refusal or not method.adapts:
            raise UsageError(f"--publish: {method.delta_refusal or f'{run.context.method} changes nothing'}")

    @property
    def _as_delta(self) -> bool:
        return self._path.name.endswith("delta.safetensors")

    def after_batch(self) -> None:
        """Publish the model if it is time to."""
        passed = (
            (time.monotonic() - self._at) / 60 if self._by_time else self._run.summary.num_updates - self._published
        )
        if passed >= self._every:
            self.publish()

    def publish(self) -> None:
        """Publish the model, unless it has not changed or the guard doubts it; a failure is only logged."""
        guard, updates = self._run.context.pipeline.guard, self._run.summary.num_updates
        if updates == self._published or (guard is not None and guard.detector.verdict != "trust"):
            return
        self._published, self._at = updates, time.monotonic()
        try:
            with self._target() as path, writing(path):
                self._write(path)
            _log.debug("published the model after %d updates: %s", updates, self._path)
        except RemttaError as error:
            _log.warning("the model was not published: %s", error)

    @contextlib.contextmanager
    def _target(self) -> Iterator[Path]:
        """Yield the path of a new file that takes its place at the end of the block."""
        folder = self._path.parent if self._path.suffix else self._path
        part = folder / f".publishing.{os.getpid()}"
        try:
            with writing(part):
                part.mkdir(parents=True)
            yield part / (self._path.name if self._path.suffix else "model.onnx")
            with writing(self._path):
                if self._path.suffix:
                    os.replace(part / self._path.name, self._path)
                    return
                numbers = [int(each.name) for each in folder.iterdir() if each.name.isdigit()]
                self._versions.append(folder / str(max(numbers, default=0) + 1))
                part.rename(self._versions[-1])
                for old in self._versions[:-_KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _write(self, path: Path) -> None:
        from remtta.deltas.delta import apply_delta, save_delta, save_weights
        from remtta.export import ExportableModel, save_onnx
        from remtta.models.card import card_of
        from remtta.runs.manifest import delta_of

        context, frames = self._run.context, self._run.summary.progress.frames_in_delta
        size, method = context.options.batch_size, context.pipeline.method
        delta = delta_of(context.card, context.method, context.config, size, context.pipeline.committed, frames)
        if self._as_delta:
            save_delta(path, delta)
            return
        with method.model.weights.at_source():
            model = copy.deepcopy(method.model.backbone.module).cpu()
        apply_delta(model, delta)
        if path.suffix == ".onnx":
            save_onnx(ExportableModel(model, {}, card_of(model), delta, ()), path)
        else:
            save_weights(path, model)
