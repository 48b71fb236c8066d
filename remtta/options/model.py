"""Options of a classifier: its weights and preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from remtta.errors import UsageError
from remtta.files import as_path
from remtta.options.option import model_option

DEFAULT_MODEL = "vit_base_patch16_224"

_CHECKPOINTS = "the checkpoint's"


def is_onnx(name: str) -> bool:
    """Return whether a model's name or file is one of ONNX."""
    return name.lower().endswith(".onnx")


@dataclass(frozen=True)
class ModelOptions:
    """Options of `load_model`; None or empty values are unset."""

    name: Annotated[
        str | None,
        model_option(
            "timm model, hf-hub:OWNER/NAME, local-dir:FOLDER (saved by timm or transformers), clip:NAME/WEIGHTS, an "
            "ONNX file, or remtta-demo.",
            flags=("--model", "-m"),
            default=f"the delta's, or {DEFAULT_MODEL}",
            common=True,
            more="models.md",
        ),
    ] = None
    checkpoint: Annotated[
        Path | str | None,
        model_option(
            "Weights: .safetensors, .pth/.pt/.tar (weights only, never run as code) or .npz.",
            default="the delta's, or timm's own; random in bench",
            common=True,
            more="models.md#weights-from-elsewhere",
        ),
    ] = None
    use_ema: Annotated[bool, model_option("Use the averaged weights (EMA) of a timm training checkpoint.")] = False
    num_classes: Annotated[
        int | None,
        model_option("Number of classes of the checkpoint's head.", min=2, default="the model's", common=True),
    ] = None
    model_kwargs: Annotated[
        Mapping[str, Any], model_option("More arguments for timm.create_model.", metavar="KEY=VALUE ...", common=True)
    ] = field(default_factory=dict)
    labels: Annotated[
        Path | Sequence[str] | None,
        model_option("Class names, one per line.", metavar="FILE", default="the model's", common=True),
    ] = None
    prompts: Annotated[
        str | Sequence[str] | None,
        model_option(
            "Templates of a zero-shot model: single, openai7, openai80, watt, or a file with one per line.",
            default="single",
            more="clip.md",
        ),
    ] = None
    text_embeddings: Annotated[
        Path | str | None,
        model_option(
            "Class embeddings for an image tower without its text tower, written by remtta text-embed.",
            metavar="FILE",
            more="clip.md#without-a-text-tower",
        ),
    ] = None
    mean: Annotated[
        tuple[float, float, float] | None,
        model_option("Pixel mean in [0, 1] per channel; one number for all.", metavar="R G B", default=_CHECKPOINTS),
    ] = None
    std: Annotated[
        tuple[float, float, float] | None,
        model_option(
            "Pixel standard deviation in [0, 1] per channel; one number for all.", metavar="R G B", default=_CHECKPOINTS
        ),
    ] = None
    input_size: Annotated[
        tuple[int, int] | None,
        model_option("Input height and width in pixels; one for both.", metavar="H W", default="the model's"),
    ] = None
    interpolation: Annotated[
        str | None, model_option("Resize filter: bilinear, bicubic, ...", default=_CHECKPOINTS)
    ] = None
    crop_pct: Annotated[
        float | None, model_option("Fraction of the short side that the centre crop keeps.", default=_CHECKPOINTS)
    ] = None

    output_name: Annotated[
        str | None,
        model_option("Output of an ONNX file with the logits.", default="the only one (B, C)", more="onnx.md"),
    ] = None
    provider: Annotated[
        str | None,
        model_option("Execution provider of onnxruntime, such as openvino.", default="by --device", more="onnx.md"),
    ] = None

    def __post_init__(self) -> None:
        if is_onnx(str(self.name)) and self.checkpoint is None:
            object.__setattr__(self, "checkpoint", self.name)
            object.__setattr__(self, "name", Path(str(self.name)).name)
        if is_onnx(str(self.name)) != self.is_onnx:
            raise UsageError("an ONNX file is a whole model: name it with --model, and leave --checkpoint out")
        if not self.is_onnx and (self.output_name or self.provider):
            raise UsageError("--output-name and --provider are for ONNX files, which --model names")

    @property
    def is_onnx(self) -> bool:
        """True if the model is an ONNX file, which is also its checkpoint."""
        return is_onnx(str(self.checkpoint))

    @property
    def weights_place(self) -> Path | None:
        """The checkpoint, or else the local folder that may be in the name; None without either."""
        local = self.checkpoint or (self.name or "").partition(":")[2]
        return Path(local) if local else None

    def check_files(self) -> None:
        """Raise UsageError if the checkpoint does not exist."""
        if self.checkpoint is not None and not (path := as_path(self.checkpoint, "checkpoint")).is_file():
            what = (
                "a folder; name the file in it"
                if path.is_dir()
                else f"no such {'model' if self.is_onnx else 'checkpoint'} file"
            )
            raise UsageError(f"{self.checkpoint}: {what}")
