"""`--live`: how a run is and what it says, on one screen of the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from remtta.cli.reporting import one_line
from remtta.runs.viewing import View, answer_of, answered_by

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_MOST_LABELS, _MOST_BARS = 8, 40
_RATE_OVER_S = 10.0


def sparkline(values: list[float]) -> str:
    """A bar for each value, from 0 to the largest."""
    most = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * value / most))] for value in values)


class LiveView:
    """Keeps what came last, and draws it.

    Args:
        state: What the source is doing: "running", "reconnecting".
        clock: Seconds, from any start.
    """

    def __init__(self, state: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._view: View | None = None
        self._arrived: deque[tuple[float, int]] = deque()
        self._entropies: deque[float] = deque(maxlen=_MOST_BARS)
        self._labels: deque[tuple[str, str, str]] = deque(maxlen=_MOST_LABELS)

    def __call__(self, view: View) -> None:
        """Take note of a batch."""
        self._view = view
        self._arrived.append((self._clock(), len(view.frames)))
        if view.summary.entropy is not None:
            self._entropies.append(view.summary.entropy)
        self._labels.extend((str(row["index"]), one_line(answer_of(row)), answered_by(row)) for row in view.rows)

    @property
    def frames_per_s(self) -> float:
        """Of the last ten seconds, or since the first frame."""
        now = self._clock()
        while len(self._arrived) > 1 and now - self._arrived[0][0] > _RATE_OVER_S:
            self._arrived.popleft()
        if len(self._arrived) < 2:
            return 0.0
        return sum(count for _, count in list(self._arrived)[1:]) / max(1e-9, now - self._arrived[0][0])

    def screen(self) -> RenderableType:
        """What to show now."""
        from rich.table import Table

        if self._view is None:
            return f"{self._state()}: no frame yet"
        summary, entropies = self._view.summary, list(self._entropies)
        lag = "" if summary.lag_s is None else f", {summary.lag_s:.1f} s behind"
        last = f" {entropies[-1]:.2f} nats" if entropies else ""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_row("frames", f"{summary.num_frames}, {self.frames_per_s:.1f}/s{lag}; {self._state()}")
        table.add_row("updates", f"{summary.num_updates}; {summary.num_skipped} frames skipped")
        table.add_row("entropy", f"{sparkline(entropies)}{last}")
        table.add_row("guard", f"{self._view.guard}, {summary.num_alarms} alarms" if self._view.guard else "none")
        for index, answer, who in self._labels:
            table.add_row(index, f"{answer}  ({who})")
        return table


@contextmanager
def live_view(state: Callable[[], str]) -> Iterator[LiveView]:
    """Draw on standard error, which is a terminal, twice a second; messages appear above."""
    from rich.console import Console
    from rich.live import Live

    view = LiveView(state)
    console = Console(stderr=True, markup=False, highlight=False)
    with Live(get_renderable=view.screen, console=console, refresh_per_second=2, transient=True, redirect_stdout=False):
        yield view
