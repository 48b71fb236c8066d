"""`remtta corrupt`: an ImageNet-C-like tree from any folder of images."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli import options as opt
from remtta.cli.progress import tree_progress
from remtta.cli.reporting import command, refused_values, signal_exit_code
from remtta.corruptions.options import CorruptOptions, parse_corruptions, parse_severities
from remtta.corruptions.parameters import CIFAR_UP_TO

_OPTIONS = CorruptOptions()


class ParameterSets(StrEnum):
    """Values of --parameters."""

    AUTO = "auto"
    IMAGENET = "imagenet"
    CIFAR = "cifar"


class Formats(StrEnum):
    """Values of --format."""

    AUTO = "auto"
    JPEG = "jpeg"
    PNG = "png"


def corrupt(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of images, with or without a folder per class, or one image.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for <corruption>/<severity>/<path below SRC>.")
    ],
    severity: Annotated[
        str, typer.Option("--severity", "-s", help="1 to 5; several with commas, such as 1,3,5.")
    ] = ",".join(map(str, _OPTIONS.severities)),
    corruptions: Annotated[
        str,
        typer.Option("--corruptions", "-c", help="standard (15), hold-out (4), all, or names with commas between."),
    ] = "standard",
    size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Resize the short side to 256/224 of N and cut out the centre, N x N. Default: keep the size."
        ),
    ] = None,
    parameters: Annotated[
        ParameterSets,
        typer.Option(help=f"ImageNet-C's or CIFAR-10-C's; auto: the latter up to {CIFAR_UP_TO} px."),
    ] = ParameterSets.AUTO,
    file_format: Annotated[
        Formats, typer.Option("--format", help="auto: PNG with CIFAR-10-C's parameters, else JPEG of quality 85.")
    ] = Formats.AUTO,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N images of every class.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier tree in DST, instead of adding what it lacks.")
    ] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes. Default: one per core.")] = None,
    seed: opt.Seed = _OPTIONS.seed,
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Corrupt every image of SRC in the ways of ImageNet-C, into a tree that tells them apart by folder.

    The same seed makes the same images. Run it again to go on after a stop, or to add corruptions and severities.

    Examples:

      remtta corrupt ./my_photos ./my_photos_c --severity 5

      remtta corrupt ./val ./val_c --severity 1,2,3,4,5 --corruptions all --size 224

      remtta corrupt ./val ./val_c --corruptions fog,snow --limit 50
    """
    with command(verbose=verbose, quiet=quiet, debug=debug) as interrupts:
        with refused_values():
            options = CorruptOptions(
                corruptions=parse_corruptions(corruptions),
                severities=parse_severities(severity),
                seed=seed,
                size=size,
                parameters=parameters.value,
                format=file_format.value,
                limit=limit,
                jobs=jobs,
                overwrite=overwrite,
            )
        from remtta.corruptions.tree import corrupt_tree

        with tree_progress(hidden=quiet) as advance:
            summary = corrupt_tree(source, destination, options, on_image=advance, interrupts=interrupts)
        if not quiet:
            typer.echo(summary.report(), err=True)
    raise typer.Exit(signal_exit_code(summary.signum))
