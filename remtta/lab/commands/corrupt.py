"""`remtta corrupt`: an ImageNet-C-like tree from any folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.progress import progress
from remtta.cli.reporting import signal_exit_code
from remtta.cli.running import RunningOptions
from remtta.interrupts import Stopped
from remtta.lab.corruptions.options import CorruptOptions
from remtta.options.option import Subset


def corrupt(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of images, with or without a folder per class, or one image.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to write to, as <corruption>/<severity>/<path below SRC>.")
    ],
    tree: CorruptOptions,
    running: Annotated[RunningOptions, Subset("verbose", "quiet", "debug")],
) -> None:
    """Write corrupted copies of every image in SRC, with the corruptions and folders of ImageNet-C.

    The same seed gives the same images. Run it again to continue after a stop, or to add corruptions and severities.

    Examples:

      remtta corrupt ./my_photos ./my_photos_c --severity 5

      remtta corrupt ./val ./val_c --severity 1,2,3,4,5 --corruptions all --size 224

      remtta corrupt ./val ./val_c --corruptions fog,snow --limit 50
    """
    with running.command() as interrupts:
        from remtta.lab.corruptions.tree import corrupt_tree

        with progress("corrupting", "images", hidden=running.quiet) as show:
            summary = corrupt_tree(
                source,
                destination,
                tree,
                on_image=lambda now: show(now.finished, now.num_images, f"{now.written} written", now.images_per_s),
                interrupts=interrupts,
            )
        running.print_message(summary.report())
        if summary.signum is not None:
            running.print_message(f"stopped by {Stopped(summary.signum)}; run it again to continue")
    raise typer.Exit(signal_exit_code(summary.signum))
