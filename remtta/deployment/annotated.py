"""A video of frames and predictions. If the run is killed, only the last frame is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from remtta.files import check_not_input, check_target, writing
from remtta.options.option import output_option
from remtta.runs.callbacks import BatchReport, Callback, PlannedRun

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.video.stream import VideoStream
    from PIL import Image

    from remtta.runs.reading import Row
    from remtta.runs.summary import RunSummary
    from remtta.streams.prefetch import DecodedFrame

MIN_WIDTH = 320
TEXT_SIZE, _BAND = 16, 64  # pixels
_FRAME_MS = 100  # duration of frames without a time of their own
_MS = Fraction(1, 1000)
# Each frame is a fragment of its own, so only the last is lost if the process is killed.
_MP4 = {"movflags": "frag_every_frame+empty_moov+default_base_moof", "flush_packets": "1"}


def check_video(path: Path, folder: Path, *, overwrite: bool, resume: bool) -> Path:
    """Return the file of a run's video: the requested one or, if the run resumes, a new one beside the earlier parts;
    raise UsageError if it cannot be created.
    """
    check_target(path, "--annotate", ".mp4", overwrite=overwrite or resume, made_by_then=folder)
    if not path.exists() or overwrite:
        return path
    number = 2
    while (part := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    return part


@dataclass(frozen=True)
class AnnotateOptions:
    """The annotated video."""

    annotate: Annotated[
        Path | None,
        output_option(
            "Write a video of the frames with label, probability, predicting model and guard state.",
            metavar="FILE.mp4",
            more="reliability.md#annotated-video",
        ),
    ] = None


class AnnotatedVideo(Callback):
    """Writes each readable frame as the model saw it, with label, probability, answering model and the guard's state.

    H.264 in a fragmented MP4. Frames of a video keep their times; others last a tenth of a second.
    """

    options = AnnotateOptions

    def __init__(self, path: Path) -> None:
        self._path = path
        self._video: tuple[OutputContainer, VideoStream] | None = None  # opened at the first frame
        self._last_ms = -_FRAME_MS
        self._shift_ms, self._previous_ms = 0, 0.0  # of the source's times

    @classmethod
    def from_options(cls, options: AnnotateOptions, run: PlannedRun) -> Self | None:
        if options.annotate is None:
            return None
        path = check_video(options.annotate, run.folder, overwrite=run.options.overwrite, resume=run.options.resume)
        if run.options.overwrite:
            check_not_input(options.annotate, "--annotate", [run.source])
        return cls(path)

    def on_batch(self, report: BatchReport) -> None:
        with writing(self._path):
            for frame, row in zip(report.frames, report.rows, strict=True):
                if frame.image is not None:
                    self._add(self._picture(frame, row, report.guard), frame.time_s)

    def on_end(self, summary: RunSummary) -> None:
        """Flush the encoder and finish the file."""
        if self._video:
            container, stream = self._video
            with writing(self._path):
                container.mux(stream.encode(None))
                container.close()

    def _add(self, picture: Image.Image, time_s: float | None) -> None:
        import av
        import numpy as np

        if self._video is None:
            self._video = self._open(*picture.size)
        container, stream = self._video
        ms = round(1000 * (time_s or 0))
        if time_s is None or ms < self._previous_ms:  # an image, or the next video of a list, whose times restart
            self._shift_ms = self._last_ms + _FRAME_MS - ms
        self._previous_ms = math.inf if time_s is None else ms
        self._last_ms = max(ms + self._shift_ms, self._last_ms + 1)  # live frames can arrive at nearly the same time
        frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
        frame.pts, frame.time_base = self._last_ms, _MS
        container.mux(stream.encode(frame))

    def _open(self, width: int, height: int) -> tuple[OutputContainer, VideoStream]:
        import av

        # An absolute path, as FFmpeg takes the 10 of 10:30.mp4 for a protocol.
        container = av.open(str(self._path.absolute()), "w", options=_MP4)
        options = {"preset": "veryfast", "tune": "zerolatency"}  # zerolatency outputs each frame at once
        stream = container.add_stream("libx264", rate=1000 // _FRAME_MS, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = _MS
        return container, stream

    def _picture(self, frame: DecodedFrame, row: Row, guard: str | None) -> Image.Image:
        """Return the frame, enlarged if small, above a band with two lines of text; both sides are even."""
        from PIL import Image, ImageDraw, ImageFont

        assert frame.image is not None
        seen = Image.fromarray(frame.image.permute(1, 2, 0).numpy())
        scale = 2 * math.ceil(MIN_WIDTH / seen.width / 2) if seen.width < MIN_WIDTH else 1
        width, height = (side * scale + side * scale % 2 for side in seen.size)
        picture = Image.new("RGB", (width, height + _BAND))
        picture.paste(seen.resize((width, height), Image.Resampling.NEAREST))
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default(TEXT_SIZE)
        verdict = f"guard: {guard}" if guard else "no guard"
        label = row["class"] if row["label"] is None else row["label"]
        lines = f"{label} {100 * row['prob']:.0f} %", f"{predicted_by(row)}; {verdict}"
        for number, line in enumerate(lines):
            text = "".join(sign if sign.isprintable() else "?" for sign in line)
            draw.text((8, height + 8 + number * _BAND // 2.3), text, fill="white", font=font, anchor="la")
        return picture


def predicted_by(row: Row) -> str:
    """Return which model made a row's prediction, in a few words."""
    name = row.get("answered_by", "adapted")
    if name != "both":
        return f"by the {name} model"
    return f"by both models, {100 * row['weight']:.0f}:{100 - 100 * row['weight']:.0f}"
