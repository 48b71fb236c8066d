"""Adapt one model to many streams, each with its own norms, optimizer, guard and folder; frozen weights are shared."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from remtta.deployment.group_callback import GroupCallback
from remtta.deployment.stream_group import SharedModelRunner, StreamGroup, StreamGroupConfig, StreamGroupSummary
from remtta.deployment.stream_lists import check_group_folder
from remtta.deployment.worker_pool import WorkerPoolRunner
from remtta.engines.cluster import connected
from remtta.errors import UsageError
from remtta.interrupts import Interrupts
from remtta.methods.settings.chosen import default_method
from remtta.models.info import model_info
from remtta.options.run_options import Engine
from remtta.pipeline.build import AdaptationConfig
from remtta.runs.folder import run_folder
from remtta.streams.sources import Stream


def adapt_streams(
    model: nn.Module,
    streams: Mapping[str, Stream],
    output: str | Path | None = None,
    setup: AdaptationConfig | None = None,
    *,
    engine: Engine = "processes",
    jobs: int = 1,
    callbacks: Sequence[GroupCallback] = (),
    interrupts: Interrupts | None = None,
) -> StreamGroupSummary:
    """Adapt one model to many streams, to each as if it were alone.

    Each stream's folder, `output/<name>`, is as `adapt_stream` leaves it; `output/site.json` has the state of every
    stream. Batches are processed in the order in which they are full. A stream that fails, stalls or starts late does
    not delay the others. With several workers, each has its own copy of the model and a share of the streams; a worker
    that dies is restarted and resumes them.

    Args:
        model: The classifier; left at its source weights.
        streams: Streams by names that are valid folder names. For workers, as returned by `open_streams`.
        output: Folder for the results; by default `runs/<UTC time>`.
        setup: How the model is adapted; by default as `remtta adapt` does. The method may change only norms.
        engine: Where workers run: "processes" of this machine, or "ray" for a cluster.
        jobs: Number of workers; with one process, everything runs in this process.
        callbacks: See the runs together.
        interrupts: Turns signals into a clean stop of all streams.

    Returns:
        The counts of each stream, and why it ended, including errors.

    Raises:
        UsageError: If there are no streams, a folder holds another run, or the method changes more than norms.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    setup = setup or AdaptationConfig(default_method(model_info(model).name))
    interrupts = interrupts or Interrupts()
    if not streams:
        raise UsageError("there are no streams to adapt to")
    if engine == "ray":
        connected()  # before a folder is touched
    with contextlib.ExitStack() as during:
        folder = during.enter_context(run_folder(output))
        check_group_folder(folder, streams, overwrite=setup.options.overwrite, resume=setup.options.resume)
        config = StreamGroupConfig(model, streams, folder, setup, interrupts, callbacks)
        if engine == "processes" and min(jobs, len(streams)) == 1:
            site: StreamGroup = (together := SharedModelRunner(config))
            together.log_context()
        else:
            site = WorkerPoolRunner(config, engine, jobs)
        during.enter_context(site.locked())
        for callback in callbacks:
            callback.on_group_start(site)
            during.callback(callback.on_group_end, site.summary)
        site.execute()
    return site.summary
