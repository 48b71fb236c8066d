"""`remtta text-embed`: write the classes of a zero-shot model to a file."""

from __future__ import annotations

from typing import Annotated

from remtta.cli.running import RunningOptions, TargetOptions, load_torch
from remtta.errors import UsageError
from remtta.files import check_not_input
from remtta.options import DEFAULT_MODEL, ModelOptions
from remtta.options.option import Subset
from remtta.zero_shot.loader import is_clip


def text_embed(
    target: TargetOptions,
    model: Annotated[ModelOptions, Subset("name", "checkpoint", "use_ema", "labels", "prompts")],
    running: Annotated[RunningOptions, Subset("device", "quiet", "debug")],
) -> None:
    """Save the class embeddings of a zero-shot model, so that a device needs only its image tower.

    Examples:

      remtta text-embed --model clip:ViT-B-16/openai --labels names.txt --prompts openai80 --output names.safetensors

      remtta adapt frames -m vit_base_patch16_clip_quickgelu_224.openai --crop-pct 1 --text-embeddings names.safetensors
    """
    with running.command():
        target.check()
        check_not_input(target.output, "--output", [model.checkpoint])
        name = model.name or DEFAULT_MODEL
        if not is_clip(model):
            raise UsageError(f"{name} has no text tower; name a zero-shot model, such as clip:ViT-B-16/openai")
        load_torch("remtta.models.loading", model)
        from remtta.zero_shot.classifier import save_text_embeddings, zero_shot_head

        head = zero_shot_head(running.load_classifier(model))
        save_text_embeddings(target.output, head, name)
        counts = f"{len(head.texts.names)} classes by {len(head.texts.templates)} templates"
        running.print_message(f"{target.output}: {counts}")
