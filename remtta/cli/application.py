"""The `remtta` command, with all its subcommands, also those of parts and of other packages."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Annotated, Any, cast

import typer

from remtta.cli.adapt import adapt
from remtta.cli.apply import apply
from remtta.cli.inspect import inspect
from remtta.cli.listings import methods, models
from remtta.cli.parameters import flatten, repeated_options
from remtta.cli.reporting import messages, one_line, open_standard_descriptors, print_version
from remtta.cli.usage import Application, Command, print_all_help, warn_of_variables
from remtta.extensions import built_in, of_packages, usable
from remtta.machine import num_cores, usable_cores
from remtta.models.peak_memory import keep_freed_memory
from remtta.options.loaders import leave_out_loaders

_CORE: dict[str, Any] = {"adapt": adapt, "apply": apply, "inspect": inspect, "methods": methods, "models": models}

_log = logging.getLogger(__name__)

app = typer.Typer(
    name="remtta",
    cls=Application,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def add_commands(to: typer.Typer) -> None:
    """Add the commands of the core, of remtta's parts and of other packages; warn of those that cannot be used."""
    with messages(logging.WARNING):
        if of_packages("loaders", ())[0]:
            commands = *_CORE.values(), *(extension.load() for extension in built_in("commands").values())
            leave_out_loaders({name for command in commands for name in repeated_options(cast(Any, command))})
        for name, command in _CORE.items():
            to.command(name, cls=Command)(flatten(command))
        found, reasons = usable("commands", lambda extension: flatten(cast(Any, extension.load())), _CORE)
        for name, command in found.items():
            to.command(name, cls=Command)(command)
        for reason in reasons:
            _log.warning("%s", one_line(reason))


add_commands(app)


@app.callback()
def common(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the versions and the device.")
    ] = False,
    help_all: Annotated[
        bool, typer.Option("--help-all", callback=print_all_help, is_eager=True, help="Show the help of every command.")
    ] = False,
) -> None:
    """Adapt a deployed image classifier online, without labels, while it predicts."""
    warn_of_variables(ctx.command.commands.values())  # type: ignore[attr-defined]


def share_cores() -> None:
    """Make PyTorch's threads share cores with other work; call it before torch is imported.

    By default they wait for each other in a busy loop, for milliseconds in GNU OpenMP. If another program or decoding
    uses one of the cores, a run then takes 6 to 11 times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if num_cores() < usable_cores():  # in a container; otherwise PyTorch's own choice is better
        os.environ.setdefault("OMP_NUM_THREADS", str(num_cores()))


def main() -> None:
    """Run the command line."""
    open_standard_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for signs that a terminal cannot encode
    keep_freed_memory()
    share_cores()
    app()
