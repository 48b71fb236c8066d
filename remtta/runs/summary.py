"""What a run came to, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remtta.deltas import DELTA
from remtta.engines.interrupts import Stopped
from remtta.errors import RemttaError
from remtta.runs.folder import PREDICTIONS
from remtta.runs.place import Place
from remtta.runs.writer import ReaderGone


class GuardStop(Exception):
    """The guard's retries are used up, and it is to end the run."""


@dataclass
class RunSummary:
    """What a run came to.

    Attributes:
        output: The run's folder.
        place: The counts, those of all parts of a run that was gone on with.
        num_alarms: Alarms of the guard.
        num_resumed: Times it was gone on with.
        exit_reason: "running", "completed", a signal's name, "closed pipe", "guard", or "error: ...".
        signum: The signal that stopped it, if one did.
        last_frame: Time at which a frame was last predicted: UTC, ISO 8601.
        lag_s: Age of a live source's oldest frame in the last batch, once it was predicted.
        entropy: Mean entropy of the last batch's predictions, in nats.
        estimates: Estimated accuracies of the last frames: of `answers`, `source` and `adapted`.
        smooths: Whether answers go by the frames before, too, where those come in order.
    """

    output: Path
    place: Place = field(default_factory=Place)
    num_alarms: int = 0
    num_resumed: int = 0
    exit_reason: str = "running"
    signum: int | None = None
    last_frame: str | None = None
    lag_s: float | None = None
    entropy: float | None = None
    estimates: Mapping[str, float] = field(default_factory=dict)
    smooths: bool = False

    def note_answer(self, read_at: str | None, entropy: float | None) -> None:
        """Note that a batch is predicted now.

        Args:
            read_at: When its first frame was read from a live source, if it was.
            entropy: Mean entropy of its predictions in nats, if there are any.
        """
        self.entropy = entropy
        now = datetime.now(UTC)
        self.last_frame = now.isoformat(timespec="seconds")
        self.lag_s = None if read_at is None else round((now - datetime.fromisoformat(read_at)).total_seconds(), 3)

    def end(self, reason: BaseException) -> None:
        """Note what ends the run: a stop, a reader that is gone, the guard, or an error."""
        if isinstance(reason, Stopped):
            self.exit_reason, self.signum = reason.name, reason.signum
        elif isinstance(reason, ReaderGone):
            self.exit_reason = "closed pipe"
        elif isinstance(reason, GuardStop):
            self.exit_reason = "guard"
        else:
            self.exit_reason = f"error: {reason}" if isinstance(reason, RemttaError) else f"error: {reason!r}"

    @property
    def ended(self) -> str | None:
        """How the run ended, in a word or two; None while it goes on."""
        return None if self.exit_reason == "running" else self.exit_reason.partition(":")[0]

    @property
    def num_frames(self) -> int:
        """Frames seen, unreadable ones included."""
        return self.place.frames

    @property
    def num_skipped(self) -> int:
        """Frames that could not be read."""
        return self.place.skipped

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken."""
        return self.place.updates

    @property
    def num_not_adapted(self) -> int:
        """Frames that were predicted and, for a reason in their rows, not adapted on."""
        return self.place.not_adapted

    @property
    def num_by_source(self) -> int:
        """Frames that the source model answered."""
        return self.place.by_source

    @property
    def num_by_both(self) -> int:
        """Frames that it had a share in."""
        return self.place.by_both

    @property
    def num_smoothed(self) -> int:
        """Frames whose answers went by the frames before, too."""
        return self.place.smoothed

    @property
    def seconds(self) -> float:
        """From the first frame asked for to the last file written."""
        return self.place.seconds

    @property
    def num_predicted(self) -> int:
        """Frames with a prediction."""
        return self.num_frames - self.num_skipped

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, decoding and writing included."""
        return self.num_predicted / self.seconds if self.seconds else 0.0

    @property
    def _guarded(self) -> bool:
        return self.num_alarms > 0 or self.num_by_source > 0

    @property
    def _told_estimates(self) -> str:
        names = [name for name in ("answers", "adapted", "source") if name in self.estimates]
        return ", ".join(f"{name} {100 * self.estimates[name]:.0f} %" for name in names)

    @property
    def _smoothing(self) -> str:
        return f"{self.num_smoothed} frames" if self.num_smoothed else "none, as no order was seen in them"

    def figures(self) -> dict[str, Any]:
        """What the report says, by name."""
        return {
            "output": str(self.output),
            "exit_reason": self.exit_reason,
            "frames": self.num_frames,
            "predicted": self.num_predicted,
            "skipped": self.num_skipped,
            "updates": self.num_updates,
            "not_adapted": self.num_not_adapted,
            "guard_alarms": self.num_alarms,
            "answered_by_source": self.num_by_source,
            "answered_by_both": self.num_by_both,
            "smoothed": self.num_smoothed,
            "images_per_s": round(self.images_per_s, 2),
            "estimate": dict(self.estimates) or None,
        }

    def report(self) -> str:
        """A few lines for a person."""
        how = "" if self.exit_reason == "completed" else f", ended early: {self.ended}"
        lines = [
            f"{self.num_frames} frames, {self.num_predicted} predicted, {self.num_skipped} skipped, "
            f"{self.num_updates} updates, {self.images_per_s:.1f} images/s{how}",
            *([f"not adapted on: {self.num_not_adapted} frames"] if self.num_not_adapted else []),
            *([f"guard: {self.num_alarms} alarms, {self.num_by_source} frames answered by the source"] * self._guarded),
            *([f"answered by both models: {self.num_by_both} frames"] if self.num_by_both else []),
            *([f"answered by the frames before, too: {self._smoothing}"] if self.smooths else []),
            *([f"estimated accuracy of the last frames: {self._told_estimates}"] if self.estimates else []),
            *(str(path) for path in (self.output / PREDICTIONS, self.output / DELTA) if path.exists()),
        ]
        return "\n".join(lines)
