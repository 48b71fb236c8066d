"""A uniform random sample of a run's frames, to be labelled by hand. Imports no torch."""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from remtta.errors import UsageError, counted
from remtta.files import read_text, remove_leftovers, to_json, write_atomically, writing
from remtta.options.option import output_option
from remtta.runs.callbacks import BatchReport, Callback, PlannedRun
from remtta.runs.folder import PREDICTIONS
from remtta.runs.reading import Row, read_rows

if TYPE_CHECKING:
    from torch import Tensor

    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

SAVED_FRAMES, LABELS, SOURCE = "saved_frames", "labels.tsv", "source.jsonl"
SAVED_NAME = re.compile(r"saved_(\d+)\.png")
"""The name of a saved frame, with its index in the run."""

_BLANK = re.compile(rf"\W*{SAVED_NAME.pattern}\W*")  # a line without a class

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class SavedFramesOptions:
    """The sample of frames."""

    save_frames: Annotated[
        int | None,
        output_option(
            "Save a uniform random sample of so many frames, to be labelled for remtta score.",
            metavar="N",
            min=1,
            more="evaluation.md#a-few-labelled-frames-of-a-stream",
        ),
    ] = None


class SavedFrames(Callback):
    """Keeps the readable frames whose indices have the smallest hashes, as the model sees them.

    That is a uniform sample of the run so far at any time, the same whether the run was stopped and resumed or not. At
    the end, the frames are listed in a file for their classes, in which those given before stay.
    """

    options = SavedFramesOptions

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count, self._seed = count, seed
        self._begun = False
        self._sample: list[tuple[int, int]] = []  # a heap of negative hash and index: the largest hash is first
        self._indices: set[int] = set()
        self._by_source: dict[int, Row] = {}  # the source model's predictions of saved frames

    @classmethod
    def from_options(cls, options: SavedFramesOptions, run: PlannedRun) -> Self | None:
        labels = run.folder / SAVED_FRAMES / LABELS
        if run.options.overwrite and any(line.strip() and not _BLANK.fullmatch(line) for line in _lines(labels)[1:]):
            raise UsageError(f"{labels} has classes for frames of the run that --overwrite replaces; move or delete it")
        return None if options.save_frames is None else cls(options.save_frames, run.options.seed)

    def on_start(self, run: Run) -> None:
        self._run, self._folder = run, run.summary.output / SAVED_FRAMES

    def on_batch(self, report: BatchReport) -> None:
        readable = {frame.index: frame.image for frame in report.frames if frame.image is not None}
        if not self._begun and report.frames:
            self._begin(report.summary, min(frame.index for frame in report.frames))
        for index, image in readable.items():
            if self._add(index):
                write_atomically(saved_path(self._folder, index), partial(_write_png, image), durable=False)
        new = {index: readable[index] for index in self._indices & readable.keys() - self._by_source.keys()}
        if new and not self._run.context.options.latency:  # with it, the update is yet to come
            self._predict_by_source(new)

    def on_end(self, summary: RunSummary) -> None:
        """List the saved frames for their classes."""
        if not self._sample:
            return
        path = self._folder / LABELS
        names = [saved_path(self._folder, index).name for index in sorted(self._indices)]
        kept = [line for line in _lines(path)[1:] if line.strip() and not _BLANK.fullmatch(line)]
        listed = {found[0] for line in kept if (found := SAVED_NAME.search(line))}
        new = [f"{name}\t" for name in names if name not in listed]
        text = "\n".join(["file\tclass", *kept, *new, ""])
        write_atomically(path, lambda temporary: temporary.write_bytes(text.encode("utf-8", "surrogateescape")))
        _log.info("saved %s; write their classes into %s for remtta score", counted(len(names), "frame"), path)

    def _predict_by_source(self, images: Mapping[int, Tensor]) -> None:
        """Write what the source model predicts for frames: in a run, it may see shifted copies, or none."""
        import torch

        from remtta.pipeline.forward import source_logits
        from remtta.runs.rows import RowFormat

        info, method = self._run.context.info, self._run.context.pipeline.method
        pixels = info.preprocessing.normalise(torch.stack(list(images.values())).to(info.device))
        rows = RowFormat(info.labels).short(source_logits(method, method.model.transform(pixels)).cpu())
        self._by_source |= {index: {"index": index, **row} for index, row in zip(images, rows, strict=True)}
        text = "".join(f"{to_json(self._by_source[index])}\n" for index in sorted(self._indices & {*self._by_source}))
        path = self._folder / SOURCE
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="ascii"), durable=False)

    def _begin(self, summary: RunSummary, first: int) -> None:
        """Find the frames that an earlier part of the run, before `first`, saved; remove those of another run."""
        self._begun = True
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            remove_leftovers(self._folder, ["saved_*.png", LABELS, SOURCE])
            for path in list(self._folder.iterdir()):
                name = SAVED_NAME.fullmatch(path.name)
                if not summary.num_resumed and (name or path.name == SOURCE):
                    path.unlink()
                elif name:
                    self._add(int(name[1]))
        if (path := self._folder / SOURCE).is_file():
            self._by_source = {row["index"]: row for row in read_rows(path)}
        rows = read_rows(self._folder.parent / PREDICTIONS) if summary.num_resumed else ()
        predicted = {row["index"] for row in rows if "class" in row}
        sample = heapq.nsmallest(self._count, predicted | self._indices, key=self._hash)
        if any(index < first and index not in self._indices for index in sample):
            _log.warning(
                "an earlier part of the run did not save its frames, so the sample is not uniform over the run"
            )

    def _add(self, index: int) -> bool:
        """Return whether a frame is now in the sample and was not before; remove the one that it replaces, if any."""
        entry = -self._hash(index), index
        if index in self._indices:
            return False
        self._indices.add(index)
        if len(self._sample) < self._count:
            heapq.heappush(self._sample, entry)
            return True
        _, replaced = heapq.heappushpop(self._sample, entry)
        self._indices.remove(replaced)
        saved_path(self._folder, replaced).unlink(missing_ok=True)
        return replaced != index

    def _hash(self, index: int) -> int:
        import hashlib  # not for help: OpenSSL takes a while to load

        return int.from_bytes(hashlib.blake2b(f"{self._seed} {index}".encode(), digest_size=8).digest())


def saved_path(folder: Path, index: int) -> Path:
    """Return the file of a frame in a folder of saved frames."""
    return folder / f"saved_{index:06d}.png"


def _lines(path: Path) -> list[str]:
    return read_text(path, "--save-frames", "surrogateescape").splitlines() if path.is_file() else []


def _write_png(image: Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, "PNG")
