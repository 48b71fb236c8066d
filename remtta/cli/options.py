"""Options that several commands share; their defaults come from the library."""

from __future__ import annotations

import ast
import math
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from remtta.errors import UsageError
from remtta.methods.settings import REMConfig
from remtta.options import GuardOptions

DEFAULT_MODEL = "vit_base_patch16_224"

_MODEL = "Model"
_METHOD = "Method"
_RUN = "Running"

_REM = REMConfig()
_MASK_RATIOS = ",".join(f"{ratio:g}" for ratio in _REM.mask_ratios)


class Optimizers(StrEnum):
    """Values of --optimizer."""

    ADAM = "adam"
    SGD = "sgd"


class Precisions(StrEnum):
    """Values of --precision."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


class Sorts(StrEnum):
    """Values of --sort."""

    NAME = "name"
    MTIME = "mtime"
    NONE = "none"


class Guards(StrEnum):
    """Values of --guard."""

    OFF = "off"
    WARN = "warn"
    ROLLBACK = "rollback"
    STOP = "stop"


class Buffers(StrEnum):
    """Values of --buffer."""

    LATEST = "latest"
    ALL = "all"


class LogFormats(StrEnum):
    """Values of --log-format."""

    TEXT = "text"
    JSON = "json"


class OnError(StrEnum):
    """Values of --on-error."""

    SKIP = "skip"
    STOP = "stop"


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help=f"timm model name, hf-hub:..., local-dir:... or remtta-demo. Default: the delta's, or {DEFAULT_MODEL}.",
        rich_help_panel=_MODEL,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Weights: .safetensors, .pth/.pt/.tar, .npz. Default: timm's own.", rich_help_panel=_MODEL),
]
UseEma = Annotated[
    bool, typer.Option("--use-ema", help="Averaged weights of a timm training checkpoint.", rich_help_panel=_MODEL)
]
NumClasses = Annotated[
    int | None, typer.Option(min=2, help="Classes of the checkpoint's head.", rich_help_panel=_MODEL)
]
ModelKwargs = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE ...", help="More arguments for the model, as in timm.", rich_help_panel=_MODEL),
]
Labels = Annotated[Path | None, typer.Option(help="Class names, one per line.", rich_help_panel=_MODEL)]
Mean = Annotated[
    tuple[float, float, float] | None,
    typer.Option(metavar="R G B", help="Pixel mean in [0, 1]. Default: the checkpoint's.", rich_help_panel=_MODEL),
]
Std = Annotated[
    tuple[float, float, float] | None,
    typer.Option(metavar="R G B", help="Pixel deviation in [0, 1]. Default: the checkpoint's.", rich_help_panel=_MODEL),
]
InputSize = Annotated[
    tuple[int, int] | None,
    typer.Option(metavar="H W", help="Input height and width in pixels.", rich_help_panel=_MODEL),
]
Interpolation = Annotated[
    str | None, typer.Option(help="Resize filter: bilinear, bicubic, ...", rich_help_panel=_MODEL)
]
CropPct = Annotated[
    float | None, typer.Option(help="Share of the short side kept by the centre crop.", rich_help_panel=_MODEL)
]
StartDelta = Annotated[
    Path | None, typer.Option("--delta", help="Start from the delta of an earlier run.", rich_help_panel=_MODEL)
]
MaskRatios = Annotated[
    str | None,
    typer.Option(
        help=f"Fractions of patch tokens to mask, 0 first. rem: {_MASK_RATIOS}.",
        rich_help_panel=_METHOD,
        show_default=False,
    ),
]
RankingWeight = Annotated[
    float | None,
    typer.Option(
        "--lambda", help=f"Weight of the entropy ranking loss. rem: {_REM.ranking_weight:g}.", rich_help_panel=_METHOD
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(
        help=f"Entropy gap between views, as a fraction of log C. rem: {_REM.margin:g}.", rich_help_panel=_METHOD
    ),
]
LearningRate = Annotated[float | None, typer.Option(help=f"rem: {_REM.lr:g}.", rich_help_panel=_METHOD)]
Optimizer = Annotated[Optimizers | None, typer.Option(help=f"rem: {_REM.optimizer}.", rich_help_panel=_METHOD)]
Momentum = Annotated[
    float | None,
    typer.Option(help=f"SGD's momentum or Adam's first beta. rem: {_REM.momentum:g}.", rich_help_panel=_METHOD),
]
Steps = Annotated[
    int | None, typer.Option(help=f"Optimizer steps per batch. rem: {_REM.steps}.", rich_help_panel=_METHOD)
]
BatchSize = Annotated[
    int,
    typer.Option("--batch-size", "-b", help="Frames per update.", rich_help_panel=_METHOD),
]
MicroBatch = Annotated[
    int | None, typer.Option(help="Frames per forward pass: same result, less memory.", rich_help_panel=_METHOD)
]
AdaptLayers = Annotated[
    str | None,
    typer.Option(
        help='Blocks whose norms adapt, such as 0-8, or "all". rem: the first three quarters.', rich_help_panel=_METHOD
    ),
]
SourceData = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Clean unlabelled images of the source domain, or the statistics (.safetensors) an earlier run "
        "computed from some, for methods that learn from them first.",
        rich_help_panel=_METHOD,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", rich_help_panel=_RUN)]
Precision = Annotated[
    Precisions,
    typer.Option(help="bf16 is faster on recent chips and not exact; auto is fp32.", rich_help_panel=_RUN),
]
Compile = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the blocks with torch.compile.", rich_help_panel=_RUN)
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads of the model. Default: all cores.", rich_help_panel=_RUN)
]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.", rich_help_panel=_RUN)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More messages.", rich_help_panel=_RUN)]
LogFormat = Annotated[
    LogFormats,
    typer.Option(help="Messages as text, or as JSON Lines with time, level and message.", rich_help_panel=_RUN),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only, no progress.", rich_help_panel=_RUN)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_RUN)]


def parse_pairs(pairs: list[str] | None, option: str = "--model-kwargs") -> dict[str, Any]:
    """`img_size=32` and the like to Python values; what is no literal stays text."""
    parsed: dict[str, Any] = {}
    for pair in pairs or []:
        key, found, value = pair.partition("=")
        if option == "--set" and found and "." in key:
            raise UsageError(f"--set {pair}: there is only one method here; write {key.partition('.')[2]}={value}")
        if not found or not key.isidentifier():
            raise UsageError(f"{option} takes key=value pairs, got {pair!r}")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
            parsed[key] = value
    return parsed


def parse_size(text: str) -> int:
    """Bytes from "800M", "1.5G" or a plain number of bytes; K, M, G and T are powers of 1024.

    Raises:
        UsageError: If it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") if found else math.inf
    if math.isinf(size):
        raise UsageError(f'cannot read the size "{text[:40]}"; write it as 800M or 1.5G')
    return int(size)


def parse_mask_ratios(text: str) -> tuple[float, ...]:
    """`0,0.1,0.2` to numbers."""
    try:
        return tuple(float(ratio) for ratio in text.split(","))
    except ValueError:
        raise UsageError(f"--mask-ratios takes numbers such as 0,0.1,0.2, got {text}") from None


def method_settings(
    *,
    mask_ratios: str | None,
    ranking_weight: float | None,
    margin: float | None,
    lr: float | None,
    optimizer: Optimizers | None,
    momentum: float | None,
    steps: int | None,
    micro_batch: int | None,
    adapt_layers: str | None,
    precision: Precisions,
) -> dict[str, Any]:
    """The settings given on the command line, by the config's field names."""
    settings = {
        "mask_ratios": None if mask_ratios is None else parse_mask_ratios(mask_ratios),
        "ranking_weight": ranking_weight,
        "margin": margin,
        "lr": lr,
        "optimizer": None if optimizer is None else optimizer.value,
        "momentum": momentum,
        "steps": steps,
        "micro_batch": micro_batch,
        "adapt_layers": adapt_layers,
        "precision": precision.value,
    }
    return {name: value for name, value in settings.items() if value is not None}


def guard_options(guard: Guards, retries: int) -> GuardOptions | None:
    """What --guard and --guard-retries ask for."""
    action: Any = guard.value
    return None if action == "off" else GuardOptions(action=action, retries=retries)


def read_labels(path: Path | None) -> list[str] | None:
    """Class names from a file, one per line."""
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UsageError(f"--labels: no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--labels: {path} cannot be read as UTF-8 text: {error}") from error
    return [line.removesuffix("\r") for line in lines]
