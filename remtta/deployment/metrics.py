"""Counts of runs for Prometheus, over HTTP."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Self

from remtta._version import __version__
from remtta.deployment.group_callback import GroupCallback
from remtta.errors import UsageError, needed
from remtta.options.option import output_option
from remtta.runs.callbacks import PlannedRun

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from remtta.deployment.stream_group import StreamGroup
    from remtta.runs.latencies import Latencies
    from remtta.runs.run import Run

IDLE_TIMEOUT_S, MAX_CLIENTS = 10.0, 16

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histograms' buckets; exact to within 4 %, the width of a bin of `Latencies`."""

_HISTOGRAMS = {
    "latency_seconds": ("Time from a batch to its predictions, per frame.", "latencies"),
    "step_seconds": ("Time of a batch with its update, per frame.", "steps"),
    "read_seconds": ("Time to read a frame from the source.", "reads"),
    "decode_seconds": ("Time to decode and preprocess a frame.", "decodes"),
}
"""Description of each metric, and the attribute of a run's record that holds it."""

Sample = Mapping[str, Any]
"""The counts of a run, as returned by `sample`."""

Watch = Callable[[], Mapping[str, Sample]]
"""Returns the current runs by stream name ("" for a single stream). Called from other threads."""


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Return host and port of `PORT` (localhost only) or `HOST:PORT` (0.0.0.0: everyone); else raise UsageError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise UsageError(f"--metrics takes PORT or HOST:PORT, such as 9108, got {text}")
    return host.strip("[]") or "127.0.0.1", int(port)


@dataclass(frozen=True)
class MetricsOptions:
    """The metrics."""

    metrics: Annotated[
        str | None,
        output_option(
            "Serve Prometheus metrics: 9108 for this machine only, 0.0.0.0:9108 for every host.",
            metavar="[HOST:]PORT",
            more="reliability.md#metrics",
        ),
    ] = None


class Metrics(GroupCallback):
    """Serves the counts of runs until it is closed.

    Values are read on request, from another thread, at no cost to the run. Raise UsageError if prometheus-client is
    missing, or the port is unavailable.
    """

    options = MetricsOptions

    def __init__(self, address: tuple[str, int]) -> None:
        prometheus_client = needed("prometheus_client", "metrics", "--metrics")
        self.watch: Watch = dict  # none so far
        registry: CollectorRegistry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(address[1], address[0], registry)
        except (OSError, UnicodeError) as error:  # UnicodeError: for a host name such as a..b
            where, why = f"{address[0]}:{address[1]}", getattr(error, "strerror", None) or error
            raise UsageError(f"--metrics {where}: {why}; choose another port, or a host of this machine") from error
        # Clients that are idle, gone or too many must not use up the file descriptors that the run needs.
        self._server.RequestHandlerClass = type("_", (self._server.RequestHandlerClass,), {"timeout": IDLE_TIMEOUT_S})
        self._server.verify_request = lambda request, address: _num_clients() < MAX_CLIENTS
        self._server.handle_error = lambda request, address: None

    @classmethod
    def from_options(cls, options: MetricsOptions, run: PlannedRun) -> Self | None:
        return None if options.metrics is None else cls(parse_metrics_address(options.metrics))

    def on_start(self, run: Run) -> None:
        self.watch = lambda: {"": sample(run)}

    def on_group_start(self, group: StreamGroup) -> None:
        self.watch = group.samples

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of every run, for prometheus_client."""
        from prometheus_client import core

        runs = self.watch()
        yield core.GaugeMetricFamily(
            "remtta_loading", "1 until the model is loaded and the runs begin.", float(not runs)
        )
        info = core.InfoMetricFamily("remtta_run", "The model and method of a run.", labels=["stream"])
        for name, run in runs.items():
            info.add_metric([name], {**run["run"], "version": __version__})
        yield info
        for group, family_type in (("counters", core.CounterMetricFamily), ("gauges", core.GaugeMetricFamily)):
            families: dict[str, core.CounterMetricFamily | core.GaugeMetricFamily] = {}
            for name, run in runs.items():
                for metric, (text, value) in run[group].items():
                    family = families.setdefault(metric, family_type(f"remtta_{metric}", text, labels=["stream"]))
                    if value is not None:
                        family.add_metric([name], value)
            yield from families.values()
        edges = [*(f"{edge:g}" for edge in BUCKETS_S), "+Inf"]
        for metric, (text, _) in _HISTOGRAMS.items():
            histogram = core.HistogramMetricFamily(f"remtta_{metric}", text, labels=["stream"])
            for name, run in runs.items():
                counts, seconds = run["histograms"][metric]
                histogram.add_metric([name], list(zip(edges, counts, strict=True)), seconds)
            yield histogram

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _num_clients() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def sample(run: Run) -> Sample:
    """Return the counts of a run in a form that JSON can hold; can be called at any time from any thread."""
    latencies: dict[str, Latencies] = {name: getattr(run.record, field) for name, (_, field) in _HISTOGRAMS.items()}
    return {
        "run": {"model": run.context.info.name, "method": run.context.method},
        "counters": _counters(run),
        "gauges": _gauges(run),
        "histograms": {name: (item.cumulative_counts(BUCKETS_S), item.seconds) for name, item in latencies.items()},
    }


def _counters(run: Run) -> dict[str, tuple[str, float | None]]:
    """Return values that only grow, over all parts of a run: description and value by name."""
    summary, guard = run.summary, run.context.pipeline.guard
    live = run.record.live_counts
    return {
        "frames": ("Frames seen, unreadable ones included.", summary.num_frames),
        "skipped": ("Frames that could not be read.", summary.num_skipped),
        "not_adapted": ("Frames predicted, but not used for an update.", summary.progress.not_adapted),
        "updates": ("Optimizer steps.", summary.num_updates),
        "answered_by_source": ("Frames predicted by the source model alone.", summary.progress.by_source),
        "answered_by_both": ("Frames predicted by source and adapted model together.", summary.progress.by_both),
        "guard_alarms": ("Alarms of the guard.", guard.status.total_alarms if guard else None),
        "dropped": ("Frames dropped for newer ones.", live.get("dropped")),
        "gaps": ("Times a live source was lost and came back.", live.get("gaps")),
    }


def _gauges(run: Run) -> dict[str, tuple[str, float | None]]:
    """Return values that rise and fall: description and value by name."""
    summary = run.summary
    predicted = None if summary.last_frame is None else datetime.fromisoformat(summary.last_frame).timestamp()
    guard = run.context.pipeline.guard if summary.num_frames else None  # before the first frame it has no state
    lead = guard.status.lead if guard else math.nan
    return {
        "running": ("1 until the run ends.", float(summary.ended is None)),
        "failed": ("1 if an error ended the run.", float(summary.ended == "error")),
        "last_frame_timestamp_seconds": ("When a frame was last predicted.", predicted),
        "lag_seconds": ("Age of a live source's oldest frame when it was predicted.", summary.lag_s),
        "entropy_nats": ("Mean entropy of the last batch's predictions.", summary.entropy),
        "estimated_accuracy": ("Of the predictions of the last 500 frames.", summary.estimates.get("answers")),
        "adapted_weight": ("Weight of the adapted model in predictions.", guard.weight if guard else None),
        "guard_lead": (
            "Relative lead of the adapted model over the source model; negative means harm.",
            lead if math.isfinite(lead) else None,
        ),
    }
