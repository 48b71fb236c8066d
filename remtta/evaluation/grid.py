"""The runs of an evaluation, each an evaluation by itself in a folder of its own, for workers anywhere."""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from remtta.deltas.delta import Delta
from remtta.engines.interrupts import Interrupts, Stopped, Told
from remtta.engines.processes import in_processes, num_jobs
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.earlier import read_earlier
from remtta.evaluation.ledger import Ledger
from remtta.evaluation.results import delta_path
from remtta.files import writing
from remtta.methods.settings import MethodConfig
from remtta.models.preprocessing import Preprocessing
from remtta.options import EvalOptions
from remtta.runs.folder import EVENTS, PREDICTIONS, RESULTS
from remtta.runs.reading import read_rows

RUNS = ".runs"

Cell = tuple[str, int]
"""A method's name and a seed."""

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Grid:
    """What the runs of an evaluation have in common, as workers get it.

    Attributes:
        model: The classifier at its source weights, pickled: each run has its own.
        dataset: The domains.
        folder: The evaluation's, which all workers can write to.
        methods: Settings by name.
        options: As of the evaluation.
        preprocessing: How images become inputs.
        delta: What every run starts from.
        learned: Files of what methods learned from source images, by name.
        threads: Of torch, in each worker.
        gpus: That a run needs.
    """

    model: bytes
    dataset: Dataset
    folder: Path
    methods: Mapping[str, MethodConfig]
    options: EvalOptions
    preprocessing: Preprocessing
    delta: Delta | None
    learned: Mapping[str, str]
    threads: int
    gpus: int

    def place(self, cell: Cell) -> Path:
        """The folder of a run."""
        return self.folder / RUNS / f"{cell[0]}_seed{cell[1]}"

    def run(self, cells: Sequence[Cell], ledger: Ledger, interrupts: Interrupts) -> None:
        """Have these runs made, and take them over in their order as they are done.

        Raises:
            RemttaError: As the runs, or if workers die again and again.
            Stopped: If a signal came in; `resume` goes on with each.
        """
        with contextlib.closing(self._made(cells, interrupts)) as made:
            whole = (cells[position] for position, is_whole in made if is_whole)  # others follow a stop
            for number, (name, seed) in enumerate(whole, 1):
                _log.info("%s, seed %d: done, %d of %d runs", name, seed, number, len(cells))
        for cell in cells:
            self._take_over(cell, ledger)
        shutil.rmtree(self.folder / RUNS)

    def _made(self, cells: Sequence[Cell], interrupts: Interrupts) -> Generator[tuple[int, bool]]:
        if self.options.engine == "ray":
            from remtta.engines.cluster import on_ray

            return on_ray(_run, self, cells, interrupts=interrupts, gpus=self.gpus)
        jobs = num_jobs(self.options.jobs or self.gpus or None)  # of one GPU, one at a time unless more are asked for
        return in_processes(_run, self, cells, jobs=jobs, interrupts=interrupts)

    def _take_over(self, cell: Cell, ledger: Ledger) -> None:
        """Have a run's rows, decisions, delta and record as if it had been made here."""
        (name, seed), place = cell, self.place(cell)
        events, delta = place / EVENTS, delta_path(place, name, seed)
        ledger.write(read_rows(place / PREDICTIONS), read_rows(events) if events.exists() else ())
        if delta.exists():
            target = delta_path(self.folder, name, seed)
            with writing(target):
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(delta, target)
        ledger.progress.finished.append(read_earlier(place / RESULTS)["methods"][name]["seeds"][str(seed)])
        ledger.save_finished()


def _run(grid: Grid, cell: Cell, stopped: Callable[[], int]) -> bool:
    """Make a run, or go on with it, unless it is made already; False if it was stopped."""
    from remtta.evaluation.runner import evaluate

    name, seed = cell
    torch.set_num_threads(grid.threads)
    with contextlib.suppress(Stopped):
        evaluate(
            pickle.loads(grid.model),
            grid.dataset,
            grid.place(cell),
            methods={name: grid.methods[name]},
            options=replace(grid.options, engine="serial", seeds=(seed,), resume=True, overwrite=False),
            preprocessing=grid.preprocessing,
            delta=grid.delta,
            source_data=grid.learned.get(name),
            interrupts=Told(stopped),
        )
        return True
    return False
