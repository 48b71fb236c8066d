"""Counts of runs for Prometheus, over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from remtta._version import __version__
from remtta.errors import UsageError, needed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from remtta.runs.budget import Latencies
    from remtta.runs.record import Plan, Record
    from remtta.runs.summary import RunSummary

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper edges of the histograms' buckets; within 4 %, the width of a bin of `Latencies`."""


@dataclass(frozen=True)
class Watched:
    """A run whose counts are told."""

    plan: Plan
    summary: RunSummary
    record: Record


Watch = Callable[[], Mapping[str, Watched]]
"""The runs there are, by the names of their streams; "" for one that needs none. Called from other threads."""


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Host and port of `PORT`, which is this machine's own address only, or `HOST:PORT`; 0.0.0.0 is every address.

    Raises:
        UsageError: If it is neither.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise UsageError(f"--metrics takes PORT or HOST:PORT, such as 9108, got {text}")
    return host.strip("[]") or "127.0.0.1", int(port)


class Metrics:
    """Serves the counts of runs as long as they run.

    Numbers are taken at the moment they are asked for, from another thread, so that they cost a run nothing.

    Args:
        address: Host and port to serve them at.

    Raises:
        UsageError: If prometheus-client is missing, or the port cannot be had.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        prometheus_client = needed("prometheus_client", "metrics", "--metrics")
        self._watch: Watch = dict
        registry: CollectorRegistry = prometheus_client.CollectorRegistry()
        registry.register(_Runs(lambda: self._watch()))
        try:
            # From the start, so that a port that is taken is told before a model is loaded.
            self._server, self._thread = prometheus_client.start_http_server(address[1], address[0], registry)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise UsageError(f"--metrics {where}: {error.strerror or error}; choose another port") from error

    @contextlib.contextmanager
    def of(self, watch: Watch) -> Iterator[None]:
        """Tell of these runs meanwhile, and of how they ended."""
        self._watch = watch
        yield

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Runs:
    """What prometheus_client calls a collector."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Every metric of every run."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        runs = self._watch()
        yield GaugeMetricFamily("remtta_loading", "1 until the model is there and the runs begin.", float(not runs))
        info = InfoMetricFamily("remtta_run", "What runs.", labels=["stream"])
        for name, run in runs.items():
            info.add_metric([name], {"model": run.plan.card.name, "method": run.plan.method, "version": __version__})
        yield info
        kinds: tuple[tuple[Any, Callable[[Watched], Mapping[str, tuple[str, float | None]]]], ...] = (
            (CounterMetricFamily, _counters),
            (GaugeMetricFamily, _gauges),
        )
        for kind, values_of in kinds:
            found = {name: values_of(run) for name, run in runs.items()}
            for metric, text in {m: text for values in found.values() for m, (text, _) in values.items()}.items():
                family = kind(f"remtta_{metric}", text, labels=["stream"])
                for name, values in found.items():
                    if (value := values.get(metric, ("", None))[1]) is not None:
                        family.add_metric([name], value)
                yield family
        for metric, text, taken in (
            ("latency_seconds", "From a full batch to its predictions, of each frame.", "latencies"),
            ("step_seconds", "What a batch took, its update included, of each frame.", "steps"),
            ("read_seconds", "What the source took to give a frame.", "reads"),
            ("decode_seconds", "What decoding and preprocessing a frame took.", "decodes"),
        ):
            histogram = HistogramMetricFamily(f"remtta_{metric}", text, labels=["stream"])
            for name, run in runs.items():
                latencies: Latencies = getattr(run.record, taken)
                counts = latencies.cumulated(BUCKETS_S)
                edges = [*(f"{edge:g}" for edge in BUCKETS_S), "+Inf"]
                histogram.add_metric([name], list(zip(edges, counts, strict=True)), latencies.seconds)
            yield histogram


def _counters(run: Watched) -> dict[str, tuple[str, float | None]]:
    """What only grows, over all parts of a run; name to meaning and value."""
    summary, live = run.summary, run.record.live_counts(run.summary.place)
    guard = run.plan.adapter.guard
    return {
        "frames": ("Frames seen, unreadable ones included.", summary.num_frames),
        "skipped": ("Frames that could not be read.", summary.num_skipped),
        "not_adapted": ("Frames predicted and not learned from.", summary.num_not_adapted),
        "updates": ("Optimizer steps.", summary.num_updates),
        "answered_by_source": ("Frames that the source model answered alone.", summary.num_by_source),
        "answered_by_both": ("Frames that the source model had a share in.", summary.num_by_both),
        "guard_alarms": ("Alarms of the guard, each a rollback.", guard.judge.total_alarms if guard else None),
        "dropped": ("Frames dropped for newer ones.", live.get("dropped")),
        "gaps": ("Times a live source was lost and came back.", live.get("gaps")),
    }


def _timestamp(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()


def _gauges(run: Watched) -> dict[str, tuple[str, float | None]]:
    """What goes up and down."""
    summary = run.summary
    guard = run.plan.adapter.guard if summary.num_frames else None  # which has seen nothing before
    return {
        "running": ("1 until the run has ended.", float(summary.ended is None)),
        "failed": ("1 where an error has ended it.", float(summary.ended == "error")),
        "last_frame_timestamp_seconds": ("When a frame was last predicted.", _timestamp(summary.last_frame)),
        "lag_seconds": ("Age of a live source's oldest frame, once predicted.", summary.lag_s),
        "entropy_nats": ("Mean entropy of the last batch's predictions.", summary.entropy),
        "estimated_accuracy": ("Of the answers to the last 500 frames.", summary.estimates.get("answers")),
        "adapted_weight": ("The adapted model's share in answers.", guard.judge.weight if guard else None),
        "guard_lead": ("What the adapted model sees more, as a share.", guard.judge.lead if guard else None),
    }
