"""Which classifier, with which weights and preprocessing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.parsing import parse_pairs, read_labels

if TYPE_CHECKING:
    from remtta.deltas.delta import Delta

DEFAULT_MODEL = "vit_base_patch16_224"

_option = partial(typer.Option, rich_help_panel="Model")


@dataclass(frozen=True)
class ModelOptions:
    """A model by name, and what it is loaded with."""

    model: Annotated[
        str | None,
        _option(
            "--model",
            "-m",
            help="timm model name, hf-hub:..., local-dir:..., clip:NAME/WEIGHTS or remtta-demo. "
            f"Default: the delta's, or {DEFAULT_MODEL}.",
        ),
    ] = None
    checkpoint: Annotated[
        Path | None, _option(help="Weights: .safetensors, .pth/.pt/.tar, .npz. Default: timm's own.")
    ] = None
    use_ema: Annotated[bool, _option("--use-ema", help="Averaged weights of a timm training checkpoint.")] = False
    num_classes: Annotated[int | None, _option(min=2, help="Classes of the checkpoint's head.")] = None
    model_kwargs: Annotated[
        list[str] | None, _option(metavar="KEY=VALUE ...", help="More arguments for the model, as in timm.")
    ] = None
    labels: Annotated[Path | None, _option(help="Class names, one per line.")] = None
    prompts: Annotated[
        str | None,
        _option(help="Templates of a zero-shot model: single, openai7, openai80, watt, or a file. Default: single."),
    ] = None
    text_embeddings: Annotated[
        Path | None,
        _option(metavar="FILE", help="Classes of an image tower without a text tower, by remtta text-embed."),
    ] = None
    mean: Annotated[
        tuple[float, float, float] | None,
        _option(metavar="R G B", help="Pixel mean in [0, 1]. Default: the checkpoint's."),
    ] = None
    std: Annotated[
        tuple[float, float, float] | None,
        _option(metavar="R G B", help="Pixel deviation in [0, 1]. Default: the checkpoint's."),
    ] = None
    input_size: Annotated[tuple[int, int] | None, _option(metavar="H W", help="Input height and width in pixels.")] = (
        None
    )
    interpolation: Annotated[str | None, _option(help="Resize filter: bilinear, bicubic, ...")] = None
    crop_pct: Annotated[float | None, _option(help="Share of the short side kept by the centre crop.")] = None
    delta: Annotated[Path | None, _option("--delta", help="Start from the delta of an earlier run.")] = None

    def given(self) -> dict[str, Any]:
        """Arguments of `load_model` from the command line; None, False or empty where not given.

        Raises:
            UsageError: If --model-kwargs are no pairs.
        """
        return {
            "name": self.model,
            "checkpoint": self.checkpoint,
            "use_ema": self.use_ema,
            "num_classes": self.num_classes,
            "model_kwargs": parse_pairs(self.model_kwargs),
            "input_size": self.input_size,
            "prompts": self.prompts,
            "text_embeddings": self.text_embeddings,
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
        }

    def class_names(self) -> list[str] | None:
        """The names in the file of --labels.

        Raises:
            UsageError: If it cannot be read.
        """
        return None if self.labels is None else read_labels(self.labels)

    def start(self) -> Delta | None:
        """The delta to start from."""
        from remtta.deltas.delta import load_delta

        return None if self.delta is None else load_delta(self.delta)
