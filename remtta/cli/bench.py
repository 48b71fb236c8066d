"""`remtta bench`: speed and memory on this machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.groups import Only
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import PrintOptions, RunningOptions
from remtta.errors import UsageError

if TYPE_CHECKING:
    from remtta.bench.measure import BenchOptions, Measurement

_MIB = 2**20


@dataclass(frozen=True)
class SubjectOptions:
    """The model to measure, whose weights may be random."""

    model: Annotated[str, typer.Option("--model", "-m", help="timm model name, or clip:NAME/WEIGHTS.")] = (
        "vit_small_patch16_224"
    )
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights: .safetensors, .pth/.pt/.tar, .npz. Default: random ones.")
    ] = None


@dataclass(frozen=True)
class RoundOptions:
    """What is measured, and how often."""

    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per step.")] = 16
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5
    methods: Annotated[
        str | None,
        typer.Option(help="Of source, tent, rem, rem-n1, remtta, fast, rem-answer, rem-plain. Default: all."),
    ] = None
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory too.")] = True


def bench(
    subject: SubjectOptions,
    architecture: Annotated[ModelOptions, Only("use_ema", "num_classes", "model_kwargs", "input_size")],
    rounds: RoundOptions,
    printed: PrintOptions,
    running: Annotated[
        RunningOptions,
        Only(
            *("device", "precision", "compile_model", "threads", "seed"), *("config", "print_config", "quiet", "debug")
        ),
    ],
) -> None:
    """Measure what a step costs here, as multiples of a plain fp32 forward pass.

    The rounds are interleaved: noise of the machine meets all methods alike.
    forward is a plain timm forward pass, rem-plain is REM as the reference code
    runs it, remtta REM as adapt runs it, fast what --preset fast runs,
    rem-answer the time to a prediction with --latency. "products" is the share of
    the time that the bare matrix products would take; "CPU s/1k" and "J/1k" are the
    time of all cores, and the energy where it can be read, for 1,000 images.

    Example:

      remtta bench --model vit_base_patch16_224 --batch-size 8
    """
    with running.command():
        options = bench_options(subject, architecture, rounds, running)

        from remtta.bench.machine import processor
        from remtta.bench.measure import as_json, run_bench
        from remtta.models.devices import select_device
        from remtta.runs.environment import environment

        try:
            measured = run_bench(options)
        except TypeError as error:
            raise UsageError(f"{subject.model} does not take these model arguments: {error}") from error
        if printed.as_json:
            record = as_json(options, measured, environment(select_device(running.device)))
            typer.echo(json.dumps(record, indent=2))
        else:
            typer.echo(_machine(processor()))
            typer.echo(_table(measured))


def bench_options(
    subject: SubjectOptions, architecture: ModelOptions, rounds: RoundOptions, running: RunningOptions
) -> BenchOptions:
    """What to measure.

    Raises:
        UsageError: If there is no such subject, or --model-kwargs are no pairs.
    """
    given = architecture.given()

    from remtta.bench.measure import SUBJECTS, BenchOptions

    return BenchOptions(
        model=subject.model,
        model_kwargs=tuple(given["model_kwargs"].items()),
        checkpoint=None if subject.checkpoint is None else str(subject.checkpoint),
        use_ema=architecture.use_ema,
        num_classes=architecture.num_classes,
        input_size=architecture.input_size,
        compile=running.compile_model,
        seed=running.seed,
        batch_size=rounds.batch_size,
        repeats=rounds.repeats,
        precision="bf16" if running.precision == "bf16" else "fp32",
        device=running.device,
        threads=running.threads,
        memory=rounds.memory,
        subjects=SUBJECTS if rounds.methods is None else tuple(rounds.methods.split(",")),
    )


def _machine(told: Mapping[str, Any]) -> str:
    instructions = ", ".join(told["instructions"]) or "instruction sets unknown"
    return f"{told['cpu']}, {told['cores']} core(s); {instructions}; PyTorch uses {told['used_by_torch']}"


def _table(measured: list[Measurement]) -> str:
    energy = any(each.joules_per_1000 is not None for each in measured)
    head = f"{'':<10} {'ms/step':>9} {'forwards':>9} {'images/s':>9} {'GFLOP':>9} {'products':>9} {'CPU s/1k':>9}"
    lines = [head + (f" {'J/1k':>9}" if energy else "") + f" {'peak MiB':>9}"]
    for each in measured:
        peak = "" if each.peak_bytes is None else f"{each.peak_bytes / _MIB:.0f}"
        share = "" if each.violating_share is None else f"  {each.violating_share:.0%} of images violate the order"
        figures = f"{1000 * each.seconds:9.1f} {each.forwards:9.2f} {each.images_per_s:9.1f} {each.gflop:9.1f}"
        spent = f"{each.cpu_s_per_1000:9.1f}" + (f" {each.joules_per_1000 or math.nan:9.1f}" if energy else "")
        lines.append(f"{each.subject:<10} {figures} {each.matmul_share:>9.0%} {spent} {peak:>9}{share}".rstrip())
    return "\n".join(lines)
