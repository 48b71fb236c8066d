"""Where a command runs, how exactly, and what it tells."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from remtta.cli.config import read_config
from remtta.cli.reporting import command
from remtta.methods.settings import REMConfig
from remtta.methods.settings.base import Precision
from remtta.options import RunOptions
from remtta.runs.interrupts import Interrupts

if TYPE_CHECKING:
    from torch import nn

    from remtta.runs.ranks import Ranks

_option = partial(typer.Option, rich_help_panel="Running")


@dataclass(frozen=True)
class RunningOptions:
    """Device, precision, threads, seed and messages."""

    device: Annotated[str, _option(help="auto, cpu, cuda or mps.")] = "auto"
    precision: Annotated[Precision, _option(help="bf16 is faster on recent chips and not exact; auto is fp32.")] = (
        REMConfig.precision
    )
    compile_model: Annotated[bool, _option("--compile/--no-compile", help="Compile the blocks with torch.compile.")] = (
        False
    )
    threads: Annotated[int | None, _option(min=1, help="CPU threads of the model. Default: all cores.")] = None
    seed: Annotated[int, _option(help="Seed of every random choice.")] = RunOptions.seed
    log_format: Annotated[
        Literal["text", "json"], _option(help="Messages as text, or as JSON Lines with time, level and message.")
    ] = "text"
    config: Annotated[
        Path | None,
        _option(
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            help="YAML file of options by their long names; the command line wins.",
        ),
    ] = None
    print_config: Annotated[
        bool, _option("--print-config", help="Print all options as --config reads them, and do nothing else.")
    ] = False
    verbose: Annotated[bool, _option("--verbose", "-v", help="More messages.")] = False
    quiet: Annotated[bool, _option("--quiet", "-q", help="Errors only, no progress.")] = False
    debug: Annotated[bool, _option("--debug", help="Show tracebacks.")] = False

    @property
    def as_json(self) -> bool:
        """Whether messages are JSON Lines."""
        return self.log_format == "json"

    @property
    def follows(self) -> bool:
        """Whether this process only takes a share of the batches that the first process of torchrun reads."""
        return under_torchrun() and os.environ["RANK"] != "0"

    @contextlib.contextmanager
    def ranks(self, interrupts: Interrupts) -> Iterator[Ranks | None]:
        """The processes of torchrun, of which only the first tells what happens; None without it."""
        if not under_torchrun():
            yield None
            return
        from remtta.runs.ranks import Ranks

        if self.follows:
            logging.getLogger("remtta").setLevel(logging.ERROR)
        with Ranks(self.device, interrupts) as ranks:
            yield ranks

    def command(self) -> AbstractContextManager[Interrupts]:
        """`reporting.command` with these messages."""
        return command(verbose=self.verbose, quiet=self.quiet, debug=self.debug, as_json=self.as_json)

    def set_threads(self, default: int | None = None) -> None:
        """Have torch use so many threads."""
        if threads := self.threads or default:
            import torch

            torch.set_num_threads(threads)

    def compile(self, model: nn.Module) -> None:
        """Compile the model's blocks, if they are to be."""
        if self.compile_model:
            from remtta.backbones.families import compile_blocks

            compile_blocks(model)


def under_torchrun() -> bool:
    """Whether this is one of several processes that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@dataclass(frozen=True)
class PrintOptions:
    """What goes to standard output."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False
