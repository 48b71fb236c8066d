"""Options shared by commands: device, threads, messages and output files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from remtta.cli.reporting import command, say
from remtta.engines.interrupts import Interrupts
from remtta.files import cache_folder, check_target
from remtta.options.option import Option, in_output

if TYPE_CHECKING:
    from torch import nn


_MAX_THREADS = 4 * (os.cpu_count() or 1)


def keep_compiled_code() -> None:
    """Make torch cache compiled code in remtta's folder: its own, in /tmp, may have been made by another user."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


@dataclass(frozen=True)
class RunningOptions:
    """Device, threads and messages."""

    device: Annotated[str, in_output("auto, cpu, cuda or mps.", common=True)] = "auto"
    compile_model: Annotated[
        bool, in_output("Compile the blocks with torch.compile.", flags=("--compile/--no-compile",))
    ] = False
    threads: Annotated[
        int | None,
        in_output("Number of CPU threads.", min=1, max=_MAX_THREADS, default="all usable cores", common=True),
    ] = None
    log_format: Annotated[
        Literal["text", "json"], in_output("Format of messages: text, or JSON Lines with time, level and message.")
    ] = "text"
    verbose: Annotated[bool, in_output("Show more messages.", flags=("--verbose", "-v"), common=True)] = False
    quiet: Annotated[bool, in_output("Show errors only.", flags=("--quiet", "-q"), common=True)] = False
    debug: Annotated[bool, in_output("Show tracebacks.")] = False

    @property
    def as_json(self) -> bool:
        """True if messages are JSON Lines."""
        return self.log_format == "json"

    def command(self) -> AbstractContextManager[Interrupts]:
        """Return `reporting.command` with these message options, before torch is loaded."""
        if self.compile_model:
            keep_compiled_code()
        return command(verbose=self.verbose, quiet=self.quiet, debug=self.debug, as_json=self.as_json)

    def tell(self, text: str) -> None:
        """Write a command's own message to standard error, unless it is to be quiet."""
        if not self.quiet:
            say(text)

    def set_threads(self, default: int | None = None) -> None:
        """Set the number of torch's threads, if given."""
        if threads := self.threads or default:
            import torch

            torch.set_num_threads(threads)

    def compile(self, model: nn.Module) -> None:
        """Compile the model's blocks, if requested."""
        if self.compile_model:
            from remtta.backbones.families import compile_blocks

            compile_blocks(model)


@dataclass(frozen=True)
class PrintOptions:
    """The format of standard output."""

    as_json: Annotated[bool, Option("Print JSON instead.", flags=("--json",))] = False

    def show(self, content: object, text: Callable[[], str]) -> None:
        """Print the content as JSON, if requested, or else the text."""
        typer.echo(json.dumps(content, indent=2) if self.as_json else text())


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The output file of a command that writes one."""

    output: Annotated[Path, Option("The .safetensors file to write.", flags=("--output", "-o"))]
    overwrite: Annotated[bool, Option("Replace an existing file.")] = False

    def check(self, suffix: str = ".safetensors") -> None:
        """Raise UsageError if the file has another suffix, or exists."""
        check_target(self.output, "--output", suffix, overwrite=self.overwrite)
