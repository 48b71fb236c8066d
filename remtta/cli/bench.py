"""`remtta bench`: speed and memory on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli import options as opt
from remtta.cli.reporting import command
from remtta.errors import UsageError

if TYPE_CHECKING:
    from remtta.bench.measure import Measurement

_MIB = 2**20


def bench(
    model: Annotated[str, typer.Option("--model", "-m", help="timm model name.")] = "vit_small_patch16_224",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights: .safetensors, .pth/.pt/.tar, .npz. Default: random ones.")
    ] = None,
    use_ema: opt.UseEma = False,
    num_classes: opt.NumClasses = None,
    model_kwargs: opt.ModelKwargs = None,
    input_size: opt.InputSize = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per step.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5,
    methods: Annotated[
        str | None, typer.Option(help="Of source, tent, rem, rem-n1, rem-answer, rem-plain. Default: all.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    device: opt.Device = "auto",
    precision: opt.Precision = opt.Precisions.AUTO,
    compile_model: opt.Compile = False,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Measure what a step costs here, as multiples of a plain fp32 forward pass.

    The rounds are interleaved: noise of the machine meets all methods alike.
    forward is a plain timm forward pass, rem-plain is REM as the reference code
    runs it, rem-answer the time to a prediction with --latency. "products" is
    the share of the time that the bare matrix products would take.

    Example:

      remtta bench --model vit_base_patch16_224 --batch-size 8
    """
    kwargs = opt.parse_pairs(model_kwargs)
    with command(quiet=quiet, debug=debug):
        from remtta.bench import measure as benchmark
        from remtta.models.devices import select_device
        from remtta.runs.environment import environment

        chosen = benchmark.SUBJECTS if methods is None else tuple(methods.split(","))
        options = benchmark.BenchOptions(
            model=model,
            model_kwargs=tuple(kwargs.items()),
            checkpoint=None if checkpoint is None else str(checkpoint),
            use_ema=use_ema,
            num_classes=num_classes,
            input_size=input_size,
            compile=compile_model,
            seed=seed,
            batch_size=batch_size,
            repeats=repeats,
            precision="bf16" if precision == opt.Precisions.BF16 else "fp32",
            device=device,
            threads=threads,
            memory=memory,
            subjects=chosen,
        )
        try:
            measured = benchmark.run_bench(options)
        except TypeError as error:
            raise UsageError(f"{model} does not take these model arguments: {error}") from error
        if as_json:
            typer.echo(json.dumps(benchmark.as_json(options, measured, environment(select_device(device))), indent=2))
        else:
            typer.echo(_table(measured))


def _table(measured: list[Measurement]) -> str:
    head = f"{'':<10} {'ms/step':>9} {'forwards':>9} {'images/s':>9} {'GFLOP':>9} {'products':>9} {'peak MiB':>9}"
    lines = [head.rstrip()]
    for each in measured:
        peak = "" if each.peak_bytes is None else f"{each.peak_bytes / _MIB:.0f}"
        share = "" if each.violating_share is None else f"  {each.violating_share:.0%} of images violate the order"
        figures = f"{1000 * each.seconds:9.1f} {each.forwards:9.2f} {each.images_per_s:9.1f} {each.gflop:9.1f}"
        lines.append(f"{each.subject:<10} {figures} {each.matmul_share:>9.0%} {peak:>9}{share}".rstrip())
    return "\n".join(lines)
