"""Shared by commands: options for device, threads, messages and output files, and the loading of torch and models."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from remtta.cli.progress import progress
from remtta.cli.reporting import command, print_message
from remtta.errors import UsageError
from remtta.files import cache_folder, check_target, to_json
from remtta.interrupts import Interrupts
from remtta.options import DEFAULT_MODEL, ModelOptions
from remtta.options.loaders import find_loaders
from remtta.options.option import Option, output_option

if TYPE_CHECKING:
    from torch import nn

    from remtta.deltas.delta import Delta

_MAX_THREADS = 4 * (os.cpu_count() or 1)

_log = logging.getLogger(__name__)


def keep_compiled_code() -> None:
    """Make torch cache compiled code in remtta's folder; torch's default in /tmp may belong to another user."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


@dataclass(frozen=True)
class RunningOptions:
    """Device, threads and messages."""

    device: Annotated[str, output_option("auto, cpu, cuda or mps.", common=True)] = "auto"
    compile_model: Annotated[
        bool, output_option("Compile the blocks with torch.compile.", flags=("--compile/--no-compile",))
    ] = False
    threads: Annotated[
        int | None,
        output_option("Number of CPU threads.", min=1, max=_MAX_THREADS, default="all usable cores", common=True),
    ] = None
    log_format: Annotated[
        Literal["text", "json"], output_option("Format of messages: text, or JSON Lines with time, level and message.")
    ] = "text"
    verbose: Annotated[bool, output_option("Show more messages.", flags=("--verbose", "-v"), common=True)] = False
    quiet: Annotated[bool, output_option("Show errors only.", flags=("--quiet", "-q"), common=True)] = False
    debug: Annotated[bool, output_option("Show tracebacks.")] = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):  # before torch is loaded, which takes seconds
            raise UsageError(
                f'unknown --device "{self.device}"; choose auto, cpu, mps, or cuda (a GPU of NVIDIA or AMD; cuda:1: '
                "the second)"
            )

    @property
    def as_json(self) -> bool:
        """True if messages are JSON Lines."""
        return self.log_format == "json"

    def command(self) -> AbstractContextManager[Interrupts]:
        """Return `reporting.command` with these message options, before torch is loaded."""
        if self.compile_model:
            keep_compiled_code()
        return command(verbose=self.verbose, quiet=self.quiet, debug=self.debug, as_json=self.as_json)

    def print_message(self, text: str) -> None:
        """Print a message to standard error, unless --quiet is set."""
        if not self.quiet:
            print_message(text)

    def set_threads(self, default: int | None = None) -> None:
        """Set the number of torch's threads, if it is an option or has a default."""
        if threads := self.threads or default:
            import torch

            torch.set_num_threads(threads)

    def load_classifier(self, model: ModelOptions, start: Delta | None = None, *, to_check: bool = False) -> nn.Module:
        """Load the model, or the one on which a `start` delta was made, and compile its blocks, if requested; show the
        progress of class embeddings. Raise RemttaError if the model cannot be loaded, or is not the delta's.
        """
        from remtta.backbones.lookup import compile_blocks
        from remtta.deltas.base_model import base_options
        from remtta.models.loading import load

        if start is not None:
            model = base_options(start, model)
        began, hidden = time.monotonic(), self.quiet or not model.loader.names_classes(model)
        with progress("reading class names", "sentences", hidden=hidden, rate_unit="sentences") as show:
            classifier = load(
                model,
                device=self.device,
                to_check=to_check,
                on_texts=lambda done, total: show(done, total, "", done / max(1e-9, time.monotonic() - began)),
            )
        if self.compile_model:
            compile_blocks(classifier)
        return classifier


@dataclass(frozen=True)
class PrintOptions:
    """The format of standard output."""

    as_json: Annotated[bool, Option("Print JSON instead.", flags=("--json",))] = False

    def show(self, content: object, text: Callable[[], str]) -> None:
        """Print the content as JSON, if requested, otherwise the text."""
        typer.echo(to_json(content, indent=2, allow_nan=True) if self.as_json else text())


def _target_files() -> str:
    """Return the help of --output: a checkpoint, or a file that is a whole model, as loaders have them."""
    files = [loader for loader in find_loaders().values() if loader.suffixes]
    others = (f", or of {loader.names} {' or '.join(loader.suffixes)}" for loader in files)
    return f"The file to write: .safetensors{''.join(others)}."


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The output file of a command that writes one."""

    output: Annotated[Path, Option(_target_files, flags=("--output", "-o"))]
    overwrite: Annotated[bool, Option("Replace an existing file.")] = False

    def check(self, suffix: str = ".safetensors") -> None:
        """Raise UsageError if the file has another suffix, or exists."""
        check_target(self.output, "--output", suffix, overwrite=self.overwrite)


def import_uncollected(*modules: str) -> None:
    """Import modules that load torch or timm, with Python's garbage collector disabled.

    Scanning hundreds of thousands of new objects takes a sixth of the time until the first prediction, and finds next
    to nothing. The imported objects are permanent, so later collections skip them, too.
    """
    if sys.modules.keys() >= {*modules}:
        return
    gc.disable()
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries complain at exit about objects that still exist
        gc.enable()


def load_torch(module: str, model: ModelOptions, delta: Path | None = None) -> None:
    """Import a module that loads torch, with a message, since it takes seconds; raise UsageError if the checkpoint or
    the delta does not exist, or the model needs a package that is missing.
    """
    model.check()
    if delta is not None:
        from remtta.deltas.delta_files import delta_file

        delta_file(delta)
    if "torch" not in sys.modules:
        name = model.name or (DEFAULT_MODEL if delta is None else f"the model of {delta}")
        _log.info("loading torch and %s ...", name)
    import_uncollected(module, *model.loader.imports)


def load_start(path: Path | None, output: Path, *, overwrite: bool) -> Delta | None:
    """Load the delta to start from, if any; raise UsageError if it is in an output folder that will be replaced."""
    from remtta.deltas.delta import load_delta

    if path is None:
        return None
    if overwrite and path.resolve().is_relative_to(output.resolve()):
        raise UsageError(f"--delta {path} is in {output}, which --overwrite would replace; choose another --output")
    return load_delta(path)
