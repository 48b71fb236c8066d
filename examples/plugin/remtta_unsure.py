"""A callback for remtta in its own package: `remtta adapt --unsure DIR` keeps the frames to label first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from remtta import Callback
from remtta.files import check_can_hold, writing
from remtta.options.option import output_option
from remtta.runs.callbacks import BatchReport, PlannedRun

if TYPE_CHECKING:  # `remtta --help` imports this file, and must not load torch
    from remtta.runs.run import Run


@dataclass(frozen=True)
class UnsureOptions:
    """Frames that the model is unsure of."""

    unsure: Annotated[Path | None, output_option("Copy frames that the model is unsure of here.", metavar="DIR")] = None
    unsure_below: Annotated[float, output_option("Probability below which it is unsure.", min=0, max=1)] = 0.5


class UnsureFrames(Callback):
    """Writes each frame whose prediction has a low probability as a PNG, as the model saw it."""

    options = UnsureOptions

    def __init__(self, folder: Path, below: float) -> None:
        self.folder, self.below = folder, below

    @classmethod
    def from_options(cls, options: UnsureOptions, run: PlannedRun) -> Self | None:
        if options.unsure is None:
            return None
        check_can_hold(options.unsure, "a folder of frames", "--unsure")
        return cls(options.unsure, options.unsure_below)

    def on_start(self, run: Run) -> None:
        with writing(self.folder):  # errors name the folder in one line
            self.folder.mkdir(parents=True, exist_ok=True)

    def on_batch(self, report: BatchReport) -> None:
        from PIL import Image

        for frame, row in zip(report.frames, report.rows, strict=True):
            if frame.image is not None and row["prob"] < self.below:
                path = self.folder / f"{frame.index}.png"
                with writing(path):
                    Image.fromarray(frame.image.permute(1, 2, 0).numpy()).save(path)
