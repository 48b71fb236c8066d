"""`remtta corrupt`: an ImageNet-C-like tree from any folder of images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.groups import Only
from remtta.cli.options.running import RunningOptions
from remtta.cli.progress import tree_progress
from remtta.cli.reporting import refused_values, signal_exit_code
from remtta.corruptions.options import CorruptOptions, Engine, Format, Parameters, parse_corruptions, parse_severities
from remtta.corruptions.parameters import CIFAR_UP_TO


@dataclass(frozen=True)
class TreeOptions:
    """What the tree holds, and how it is made."""

    severity: Annotated[str, typer.Option("--severity", "-s", help="1 to 5; several with commas, such as 1,3,5.")] = (
        ",".join(map(str, CorruptOptions.severities))
    )
    corruptions: Annotated[
        str,
        typer.Option("--corruptions", "-c", help="standard (15), hold-out (4), all, or names with commas between."),
    ] = "standard"
    size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Resize the short side to 256/224 of N and cut out the centre, N x N. Default: keep the size."
        ),
    ] = CorruptOptions.size
    parameters: Annotated[
        Parameters, typer.Option(help=f"ImageNet-C's or CIFAR-10-C's; auto: the latter up to {CIFAR_UP_TO} px.")
    ] = CorruptOptions.parameters
    format: Annotated[Format, typer.Option(help="auto: PNG with CIFAR-10-C's parameters, else JPEG of quality 85.")] = (
        CorruptOptions.format
    )
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N images of every class.")] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier tree in DST, instead of adding what it lacks.")
    ] = CorruptOptions.overwrite
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes. Default: one per core.")] = None
    engine: Annotated[Engine, typer.Option(help="Processes of this machine, or the workers of Ray.")] = (
        CorruptOptions.engine
    )

    @refused_values()
    def options(self, *, seed: int) -> CorruptOptions:
        """What is made of each image.

        Raises:
            UsageError: If a value is out of range.
        """
        return CorruptOptions(
            corruptions=parse_corruptions(self.corruptions),
            severities=parse_severities(self.severity),
            seed=seed,
            size=self.size,
            parameters=self.parameters,
            format=self.format,
            limit=self.limit,
            jobs=self.jobs,
            engine=self.engine,
            overwrite=self.overwrite,
        )


def corrupt(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of images, with or without a folder per class, or one image.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for <corruption>/<severity>/<path below SRC>.")
    ],
    tree: TreeOptions,
    running: Annotated[
        RunningOptions, Only("config", "print_config", "verbose", "quiet", "debug", seed=CorruptOptions.seed)
    ],
) -> None:
    """Corrupt every image of SRC in the ways of ImageNet-C, into a tree that tells them apart by folder.

    The same seed makes the same images. Run it again to go on after a stop, or to add corruptions and severities.

    Examples:

      remtta corrupt ./my_photos ./my_photos_c --severity 5

      remtta corrupt ./val ./val_c --severity 1,2,3,4,5 --corruptions all --size 224

      remtta corrupt ./val ./val_c --corruptions fog,snow --limit 50
    """
    with running.command() as interrupts:
        options = tree.options(seed=running.seed)

        from remtta.corruptions.tree import corrupt_tree

        with tree_progress(hidden=running.quiet) as advance:
            summary = corrupt_tree(source, destination, options, on_image=advance, interrupts=interrupts)
        if not running.quiet:
            typer.echo(summary.report(), err=True)
    raise typer.Exit(signal_exit_code(summary.signum))
