"""`run.json`: everything needed to repeat a run, and what came of it."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.deltas.delta import Delta
from remtta.files import write_json
from remtta.guard.accuracy import Estimator
from remtta.guard.observed import ObservedMethod
from remtta.guard.pace import Pace
from remtta.guard.smoothing import Smoother
from remtta.methods.settings import MethodConfig
from remtta.models.card import ModelCard
from remtta.options import RunOptions
from remtta.runs.batch import Counts
from remtta.runs.budget import Latencies
from remtta.runs.environment import environment
from remtta.runs.folder import RECORD
from remtta.runs.place import Place
from remtta.runs.summary import RunSummary
from remtta.streams.decoding_budget import Budget
from remtta.streams.sources import Stream

_HEADER_BYTES = 65_536  # more than a run.json, a delta's or a state's header takes
_MOST_BYTES = 64 * 1024**2  # a method that changes all weights would ask for gigabytes


@dataclass(frozen=True)
class Plan:
    """What a run of `adapt` is made of, fixed before its first frame.

    Attributes:
        card: The model's.
        adapter: The method, perhaps under the guard, on that model.
        method: The method's name.
        config: Its settings.
        options: How the stream is run.
        stream: Where the frames come from.
        start: The delta that it starts from, if there is one.
        learned: What the method learned from source images, for the record.
        memory: What decoding may take, where other runs share it.
        earlier: The record of the run that it goes on with.
    """

    card: ModelCard
    adapter: ObservedMethod
    method: str
    config: MethodConfig
    options: RunOptions
    stream: Stream
    start: Delta | None = None
    learned: Mapping[str, Any] | None = None
    memory: Budget | None = None
    earlier: Mapping[str, Any] | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The method's settings as records and deltas have them."""
        return hyperparameters(self.config, self.options.batch_size)

    @property
    def last_bytes(self) -> int:
        """About what the files take that a run writes last."""
        delta, state = (
            sum(tensor.nbytes for tensor in tensors.values())
            for tensors in (self.adapter.method.committed[0], self.adapter.state())
        )
        # An optimizer's state comes with its first step, up to two more values per weight; the guard's with its frames.
        room = delta + state + 2 * delta + 3 * _HEADER_BYTES
        if self.adapter.guard:
            room += self.adapter.guard.most_bytes(self.card.num_classes)
        return min(room, _MOST_BYTES)


def hyperparameters(config: MethodConfig, batch_size: int) -> dict[str, Any]:
    """A method's settings as records and deltas have them."""
    return {**dataclasses.asdict(config), "batch_size": batch_size}


def delta_of(
    card: ModelCard,
    method: str,
    settings: Mapping[str, Any],
    committed: tuple[Mapping[str, Tensor], int],
    counts: Counts,
    *,
    start: Delta | None,
    conditions: Mapping[str, str],
) -> Delta:
    """What adaptation changed, with where it comes from.

    Args:
        card: The model's.
        method: The method's name.
        settings: Its hyperparameters.
        committed: Adapted minus source weights, and the number of updates behind them.
        counts: Of the run, up to these weights.
        start: The delta that it started from, if there is one.
        conditions: Which run it was, and on what, for the delta's lineage.
    """
    tensors, updates = committed
    builds_on = start is not None and counts.frames_in_delta > counts.frames_since_reset  # no reset has undone it
    return Delta(
        tensors={name: tensor.cpu() for name, tensor in tensors.items()},
        model=card.name,
        base_sha256=card.sha256,
        method=method,
        hyperparameters=settings,
        frames=counts.frames_in_delta,
        updates=updates,
        model_options=card.options,
        preprocessing=card.preprocessing.as_dict(),
        lineage={**conditions, "parents": [start.as_parent()] if start and builds_on else []},
    )


class Record:
    """Writes `run.json`.

    Args:
        plan: What is being run.
        folder: The run's folder.

    Attributes:
        run: The run's own name, which it keeps when it goes on.
        started: When the run began: UTC, ISO 8601.
        latencies: How long predictions took.
        steps: How long batches took, their updates included.
        reads: How long the source took to give a frame.
        decodes: How long decoding and preprocessing one took.
        dropped_before: Frames that a live source dropped in earlier parts of the run.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._path = plan, folder / RECORD
        self.run = uuid.uuid4().hex
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.latencies, self.steps = Latencies(), Latencies()
        self.reads, self.decodes = Latencies(), Latencies()
        self.dropped_before = 0
        self._environment = environment(plan.card.device)

    def go_on(self, earlier: Mapping[str, Any], place: Place) -> None:
        """Go on with an earlier run's record, which had come to this place."""
        timing = earlier.get("timing", {})
        self.run = earlier.get("run") or self.run
        self.started = timing.get("started", self.started)
        self.latencies.before = timing.get("latency_ms")
        self.dropped_before = place.dropped

    @property
    def conditions(self) -> dict[str, str]:
        """Which run it is and on what, for the lineage of its deltas."""
        stream = self._plan.stream
        return {
            "made_by": "adapt",
            "run": self.run,
            "source": stream.name,
            "kind": stream.kind,
            "started": self.started,
        }

    @property
    def num_dropped(self) -> int:
        """Frames that were dropped for newer ones, in all parts of the run."""
        live = self._plan.stream.live_source
        return self.dropped_before + (live.dropped if live else 0)

    def live_counts(self, place: Place) -> dict[str, int]:
        """Counts that only live sources have."""
        return {"dropped": self.num_dropped, "gaps": place.gaps} if self._plan.stream.live else {}

    def write(self, summary: RunSummary) -> None:
        """Replace the file.

        Raises:
            OutputError: If the disk refuses.
        """
        write_json(self._path, self.content(summary))

    def content(self, summary: RunSummary) -> dict[str, Any]:
        """What the file holds, for a run that has come so far."""
        plan, place = self._plan, summary.place
        live = plan.stream.live_source
        return {
            "run": self.run,
            "exit_reason": summary.exit_reason,
            "resumed": summary.num_resumed,
            "counts": {
                "frames": summary.num_frames,
                "predicted": summary.num_predicted,
                "skipped": summary.num_skipped,
                "updates": summary.num_updates,
                "not_adapted": place.not_adapted,
                **({"smoothed": place.smoothed} if plan.adapter.find(Smoother) else {}),
                **self.live_counts(place),
            },
            "timing": {
                "started": self.started,
                "seconds": round(summary.seconds, 3),
                "images_per_s": round(summary.images_per_s, 2),
                "latency_ms": self.latencies.percentiles_ms(),  # of a full batch, since the run began or went on
            },
            "source": {
                "name": plan.stream.name,
                "kind": plan.stream.kind,
                "num_frames": plan.stream.num_frames,
                **({"left_out": dict(plan.stream.left_out)} if plan.stream.left_out else {}),
                **({"live": dataclasses.asdict(live.options)} if live else {}),
            },
            "model": {
                **plan.card.origin,
                "num_classes": plan.card.num_classes,
                "base_sha256": plan.card.sha256,
                "start_delta": None if plan.start is None else plan.start.origin,
            },
            "preprocessing": plan.card.preprocessing.as_dict(),
            "method": {"name": plan.method, **plan.hyperparameters},
            "source_statistics": plan.learned,
            "guard": guard_record(plan.adapter, place),
            "pace": pace.record() if (pace := plan.adapter.find(Pace)) else None,
            "accuracy": estimator.record() if (estimator := plan.adapter.find(Estimator)) else None,
            "options": {key: value for key, value in dataclasses.asdict(plan.options).items() if key != "batch_size"},
            "adapted": list(plan.adapter.method.adapted_names),
            "environment": self._environment,
        }


def guard_record(adapter: ObservedMethod, counts: Counts) -> dict[str, Any] | None:
    """What the guard came to in a run of these counts; None without one."""
    if adapter.guard is None:
        return None
    answered = {"answered_by_source": counts.by_source, "answered_by_both": counts.by_both}
    return {"alarms": adapter.total_alarms, "retired": adapter.retired, **answered}
