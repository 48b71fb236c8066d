"""`remtta pick`: frames of a run to label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from remtta.cli.groups import Only
from remtta.cli.loading import load_adapted
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.errors import UsageError


@dataclass(frozen=True)
class ListOptions:
    """How many frames, and where to."""

    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Frames to label.")] = 100
    by: Annotated[
        Literal["chance", "doubt"],
        typer.Option(help="Frames drawn by chance, or doubtful ones of which no two are alike."),
    ] = "chance"
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
    model: Annotated[
        ModelOptions,
        Only("model", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "text_embeddings"),
    ],
    running: Annotated[RunningOptions, Only("device", "threads", "seed", "quiet", "debug")],
) -> None:
    """Pick frames of RUN to label, by chance or by doubt.

    By doubt: those on which the adapted and the source model disagree come first, of runs with --each, then the
    least sure ones. These images are read again, with the run's model and delta. What was trained on frames drawn by
    chance had fewer errors where it was measured.

    Examples:

      remtta pick runs/20261120T120000Z -n 100 > label_these.csv

      remtta pick run1 --by doubt --output to_label --checkpoint vit.safetensors
    """
    with running.command() as interrupts:
        wanted.check()
        given = model.given()

        from remtta.runs.picking import csv_text, pick_by_doubt, read_predicted, write_list

        predicted = read_predicted(run)
        if wanted.by == "chance":
            picked = predicted.by_chance(wanted.number, running.seed)
        else:
            running.set_threads()
            classifier = load_adapted(run, given, running.device)
            picked = pick_by_doubt(classifier, predicted, wanted.number, interrupts.check)
        if wanted.output is None:
            typer.echo(csv_text(picked), nl=False)
        else:
            write_list(wanted.output, picked, predicted)
            if not running.quiet:
                typer.echo(f"{wanted.output}: {len(picked)} frames", err=True)
