"""Ways to look on at a run of `remtta adapt`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.options.run import OutputOptions
from remtta.errors import UsageError
from remtta.runs.annotated import AnnotatedVideo, check_video
from remtta.runs.publishing import Publisher, parse_topic

if TYPE_CHECKING:
    from remtta.runs.viewing import Viewer
    from remtta.streams.sources import Stream

_option = partial(typer.Option, rich_help_panel="Stream and output")


@dataclass(frozen=True)
class ViewOptions:
    """A video of what was said of each frame, and a broker that gets the predictions."""

    annotate: Annotated[
        Path | None,
        _option(
            metavar="FILE.mp4",
            help="Video of the frames with label, probability, who answered and the guard's standing.",
        ),
    ] = None
    mqtt: Annotated[
        str | None,
        _option(
            metavar="mqtt://HOST/TOPIC",
            help="Send the predictions to an MQTT broker, too, each at least once; mqtts:// for TLS.",
        ),
    ] = None

    def check(self, folder: Path, frames: Stream | Mapping[str, Stream], output: OutputOptions) -> None:
        """Refuse what cannot be had, before any work.

        Raises:
            UsageError: If a video or a topic cannot be had, or there are many streams.
        """
        if isinstance(frames, Mapping) and (self.annotate or self.mqtt):
            raise UsageError("--annotate and --mqtt are for one stream; leave them out with --streams")
        self._video(folder, output)
        if self.mqtt:
            parse_topic(self.mqtt)

    def _video(self, folder: Path, output: OutputOptions) -> Path | None:
        if self.annotate is None:
            return None
        return check_video(self.annotate, folder, overwrite=output.overwrite, resume=output.resume)

    @contextlib.contextmanager
    def viewers(self, folder: Path, output: OutputOptions) -> Iterator[list[Viewer]]:
        """Who is to look on, as long as the run goes."""
        with contextlib.ExitStack() as looking:
            viewers: list[Viewer] = []
            if self.mqtt:
                publisher = Publisher(parse_topic(self.mqtt), folder, resume=output.resume)
                viewers.append(looking.enter_context(contextlib.closing(publisher)))
            if video := self._video(folder, output):
                viewers.append(looking.enter_context(contextlib.closing(AnnotatedVideo(video))))
            yield viewers
