"""`remtta pick`: the frames of a run that are most worth labelling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.groups import Only
from remtta.cli.loading import model_arguments
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.errors import UsageError


@dataclass(frozen=True)
class ListOptions:
    """How many frames, and where to."""

    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Frames to label.")] = 100
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A .csv list, a .json one (COCO's images, categories, annotations), or a folder to copy the frames "
            "to. Default: a list on standard output.",
        ),
    ] = None

    def check(self) -> None:
        """Refuse to replace anything."""
        there = self.output
        if there is not None and there.exists() and not (there.is_dir() and not any(there.iterdir())):
            raise UsageError(f"{there} exists; choose another --output")


def pick(
    run: Annotated[Path, typer.Argument(help="The folder of a run of remtta adapt.")],
    wanted: ListOptions,
    model: Annotated[ModelOptions, Only("model", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size")],
    running: Annotated[RunningOptions, Only("device", "threads", "quiet", "debug")],
) -> None:
    """Pick the frames of RUN that are most worth labelling: doubtful ones, and no two alike.

    Those on which the adapted and the source model disagree come first, of runs with --each. The images are read
    again, with the run's model and delta.

    Examples:

      remtta pick runs/20261120T120000Z -n 100 > label_these.csv

      remtta pick run1 --output to_label --checkpoint vit.safetensors
    """
    with running.command() as interrupts:
        wanted.check()
        given = model.given()

        from remtta.deltas.delta import apply_delta, load_delta
        from remtta.models.labels import labels_of
        from remtta.models.loading import load_model
        from remtta.runs.picking import candidates_of, csv_text, write_list
        from remtta.runs.picking import pick as pick_of

        running.set_threads()
        candidates = candidates_of(run, wanted.number)
        delta = load_delta(run)
        classifier = load_model(**model_arguments(given, delta), device=running.device)
        apply_delta(classifier, delta)
        picked = pick_of(classifier, candidates, wanted.number, interrupts.check)
        if wanted.output is None:
            typer.echo(csv_text(picked), nl=False)
        else:
            write_list(wanted.output, picked, labels_of(classifier), candidates.num_classes)
            if not running.quiet:
                typer.echo(f"{wanted.output}: {len(picked)} frames", err=True)
