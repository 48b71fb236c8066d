"""Callbacks that see many streams at once. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remtta.runs.callbacks import Callback

if TYPE_CHECKING:
    from remtta.deployment.stream_group import StreamGroup, StreamGroupSummary


class GroupCallback(Callback):
    """Sees one run, or the runs of many streams; every hook does nothing by default."""

    def on_group_start(self, group: StreamGroup) -> None:
        """Prepare, before the first frame of any stream."""

    def on_group_batch(self, summary: StreamGroupSummary) -> None:
        """Take the counts after a batch, or from time to time; from any thread, but never concurrently."""

    def on_group_end(self, summary: StreamGroupSummary) -> None:
        """Finish, after a failure as well, if `on_group_start` returned."""
