"""`remtta bench`: speed and memory on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.running import PrintOptions, RunningOptions, keep_compiled_code, load_torch
from remtta.errors import counted
from remtta.lab.bench_options import BenchOptions
from remtta.options.option import Subset

if TYPE_CHECKING:
    from remtta.lab.bench import Measurement

_MIB = 2**20


def bench(
    bench: BenchOptions,
    printed: PrintOptions,
    running: Annotated[RunningOptions, Subset("device", "threads", "quiet", "debug")],
) -> None:
    """Measure the time and memory of a step on this machine, relative to a plain fp32 forward pass.

    Methods take turns, so that noise affects all of them alike. Without
    --checkpoint, weights are random. In the table, forward is a plain timm
    forward pass, and "CPU s/1k" the seconds of all cores for 1,000 images.

    Example:

      remtta bench --model vit_base_patch16_224 --batch-size 8
    """
    with running.command():
        if bench.compile:
            keep_compiled_code()
        load_torch("remtta.lab.bench", bench.model)
        from remtta.lab.bench import as_json, processor, run_bench
        from remtta.models.loading import select_device
        from remtta.runs.record import environment

        options = replace(bench, device=running.device, threads=running.threads)
        measured = run_bench(options)
        if printed.as_json:
            record = as_json(options, measured, environment(select_device(running.device)))
            typer.echo(json.dumps(record, indent=2))
        else:
            cpu = processor()
            cores = counted(int(cpu["cores"]), "core")
            typer.echo(f"{cpu['cpu']}, {cores}; PyTorch uses {cpu['used_by_torch']}")
            typer.echo(_table(measured))


def _table(measured: list[Measurement]) -> str:
    lines = [f"{'':<11} {'ms/step':>9} {'forwards':>9} {'images/s':>9} {'CPU s/1k':>9} {'peak MiB':>9}"]
    for row in measured:
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / _MIB:.0f}"
        figures = f"{1000 * row.seconds:9.1f} {row.forwards:9.2f} {row.images_per_s:9.1f} {row.cpu_s_per_1000:9.1f}"
        name = row.subject if row.precision == "fp32" else f"{row.subject} {row.precision}"
        lines.append(f"{name:<11} {figures} {peak:>9}".rstrip())
    return "\n".join(lines)
