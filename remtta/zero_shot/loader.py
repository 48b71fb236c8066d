"""The loader of zero-shot models, and of image towers with text embeddings. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from remtta.errors import UsageError, check_installed
from remtta.models.timm_loader import IMPORTS
from remtta.options.loaders import OPTIONAL, Loader, OnTexts
from remtta.options.option import model_option
from remtta.zero_shot.prompts import CLIP, TEMPLATES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from remtta.options import ModelOptions


@dataclass(frozen=True)
class ZeroShotOptions:
    """Options of a zero-shot model."""

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


class ZeroShotLoader(Loader):
    """Models of open_clip, and timm's image towers with text embeddings in place of a head."""

    names = "clip:NAME/WEIGHTS"
    options = ZeroShotOptions
    takes = OPTIONAL
    imports = IMPORTS

    def matches(self, options: ModelOptions) -> bool:
        return is_clip(options) or options.own.get("text_embeddings") is not None

    def names_classes(self, options: ModelOptions) -> bool:
        return is_clip(options)

    def check(self, options: ModelOptions) -> None:
        super().check(options)
        own: ZeroShotOptions = self.own_options(options)
        if not is_clip(options):
            if own.prompts is not None:
                raise UsageError(f"--prompts are for zero-shot models (clip:...), and {options.name} has no text tower")
            if options.labels is not None:
                raise UsageError("--text-embeddings have class names of their own; leave --labels out")
            return
        if options.num_classes or options.model_kwargs or own.text_embeddings:
            raise UsageError(
                f"{options.name} has the classes that --labels names, and takes no --num-classes, --model-kwargs or "
                "--text-embeddings"
            )
        check_installed("open_clip", "clip", options.name or "")

    def load(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        from remtta.zero_shot.models import load_image_tower, load_zero_shot

        own: ZeroShotOptions = self.own_options(options)
        if own.text_embeddings is not None:
            return load_image_tower(options, own.text_embeddings)
        return load_zero_shot(options, own.prompts, device, on_texts)

    def is_safe(self, option: str, value: object) -> bool:
        if isinstance(value, list):
            return option == "prompts" and all(isinstance(template, str) for template in value)
        return option == "prompts" and value in TEMPLATES  # another text would be the name of a file


def is_clip(options: ModelOptions) -> bool:
    """Return whether a model has a text tower, which embeds the class names that the user gives."""
    return (options.name or "").startswith(CLIP)
