"""Options of a benchmark: the model, and the methods to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from remtta.errors import UsageError
from remtta.options.model import ModelOptions
from remtta.options.option import Option, Subset, check_options
from remtta.options.run_options import MAX_SEED

FORWARD = "forward"
SUBJECTS = (FORWARD, "source", "tent", "rem", "rem-n1", "remtta", "fast")

_MODEL = "vit_small_patch16_224"
_SMALL = ModelOptions(_MODEL)


@dataclass(frozen=True)
class BenchOptions:
    """The methods to measure, on a timm model with random weights or a checkpoint, or on a zero-shot model."""

    model: Annotated[
        ModelOptions,
        Subset(
            *("checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "own"),
            name=_MODEL,
        ),
    ] = _SMALL
    batch_size: Annotated[int, Option("Images per step.", flags=("--batch-size", "-b"), min=1, max=10_000)] = 16
    repeats: Annotated[int, Option("Number of rounds, of which the median is reported.", min=1)] = 5
    subjects: Annotated[
        tuple[str, ...],
        Option(
            f"Methods to measure, of {', '.join(SUBJECTS[1:])}.", flags=("--methods",), metavar="A,B", default="all"
        ),
    ] = SUBJECTS
    memory: Annotated[bool, Option("Also measure peak memory.", flags=("--memory/--no-memory",))] = True
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Option("bf16 is less exact; auto takes it for remtta and fast where it is faster."),
    ] = "auto"
    compile: Annotated[bool, Option("Compile the blocks with torch.compile.", flags=("--compile/--no-compile",))] = (
        False
    )
    device: str = "auto"
    threads: int | None = None
    seed: Annotated[int, Option("Seed of the random weights and images.", min=0, max=MAX_SEED)] = 0
    mask_ratios: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if unknown := [name for name in self.subjects if name not in SUBJECTS]:
            raise UsageError(f"cannot measure {', '.join(unknown)}; choose from {', '.join(SUBJECTS)}")
        if self.model.use_ema and self.model.checkpoint is None:
            raise UsageError("--use-ema chooses among the weights of a --checkpoint; name one")
