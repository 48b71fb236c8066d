"""Many streams on one model: its frozen weights once; of each stream its own norms, optimizer, guard and folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from remtta.adapt.divided import Divided
from remtta.adapt.planning import Setup
from remtta.adapt.site import Site, SiteSummary
from remtta.adapt.together import Together
from remtta.engines.interrupts import Interrupts
from remtta.options.run import Engine
from remtta.runs.folder import check_site, run_folder
from remtta.streams.sources import Stream
from remtta.watching.health import HealthFile, check_health_path
from remtta.watching.metrics import Metrics


def adapt_streams(
    model: nn.Module,
    streams: Mapping[str, Stream],
    output: str | Path | None = None,
    setup: Setup | None = None,
    *,
    engine: Engine = "processes",
    jobs: int = 1,
    health: str | Path | None = None,
    metrics: Metrics | None = None,
    on_batch: Callable[[SiteSummary], None] | None = None,
    interrupts: Interrupts | None = None,
) -> SiteSummary:
    """Adapt one model to many streams, to each as if it were alone.

    Each stream's folder, `output/<name>`, is what `adapt_stream` leaves of it; `output/site.json` says how each is.
    Batches are predicted and learned from in the order in which they are full. A stream that fails, stalls or comes
    late keeps none of the others waiting. With several workers each has the model for its share of the streams; one
    that dies is begun again, and goes on with them.

    Args:
        model: A timm classifier, as from `load_model`; left at its source weights.
        streams: What to read, by names that can be folders'. For workers as `open_streams` opens them.
        output: Folder for the results; by default `runs/<UTC time>`.
        setup: How it is adapted; by default as `remtta adapt` does. The method must leave all but norms as they are.
        engine: Where workers are: "processes" of this machine, or "ray": those of a cluster.
        jobs: Workers; one process is this one.
        health: A JSON file that is replaced every few seconds with how each run is.
        metrics: What serves the counts meanwhile.
        on_batch: Called after every batch, or now and then, with the counts so far; from any thread, but one at a time.
        interrupts: Turns signals into a clean stop of all.

    Returns:
        The counts of each, and the reason why it ended: of one that failed, its error.

    Raises:
        UsageError: If a folder holds another run, or the method changes more than norms.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    setup, interrupts = setup or Setup(), interrupts or Interrupts()
    with contextlib.ExitStack() as during:
        folder = during.enter_context(run_folder(output))
        check_site(folder, streams, overwrite=setup.options.overwrite, resume=setup.options.resume)
        if health is not None:
            check_health_path(Path(health), folder)
        if engine == "processes" and min(jobs, len(streams)) == 1:
            together = Together(model, streams, folder, setup, interrupts, on_batch=on_batch)
            together.tell_plan()
            site: Site = together
        else:
            site = Divided(model, streams, folder, setup, interrupts, engine=engine, jobs=jobs, on_batch=on_batch)
        during.enter_context(site.locked())
        if health is not None:
            during.enter_context(contextlib.closing(HealthFile(Path(health), site.vitals)))
        if metrics is not None:
            during.enter_context(metrics.of(site.samples))
        site.execute()
    return site.summary
