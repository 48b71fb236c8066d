"""`remtta text-embed`: the class embeddings of a zero-shot model, in a file."""

from __future__ import annotations

from typing import Annotated

import typer

from remtta.cli.groups import Only
from remtta.cli.loading import load_classifier, model_arguments
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.cli.options.target import TargetOptions
from remtta.errors import UsageError


def text_embed(
    target: TargetOptions,
    model: Annotated[ModelOptions, Only("model", "checkpoint", "use_ema", "labels", "prompts")],
    running: Annotated[RunningOptions, Only("device", "quiet", "debug")],
) -> None:
    """Write what a zero-shot model's text tower says of class names, for devices that have its image tower only.

    Example:

      remtta text-embed --model clip:ViT-B-16/openai --labels names.txt --prompts openai80 --output names.safetensors

      remtta adapt ./frames --model vit_base_patch16_clip_224.openai --text-embeddings names.safetensors
    """
    with running.command():
        arguments, labels = model_arguments(model.given()), model.class_names()

        from remtta.models.prompts import is_zero_shot
        from remtta.models.text_embeddings import save_text_embeddings
        from remtta.models.zero_shot import zero_shot_head

        target.check()
        name = arguments["name"]
        if not is_zero_shot(name):
            raise UsageError(f"{name} has no text tower; name a zero-shot model, such as clip:ViT-B-16/openai")
        head = zero_shot_head(load_classifier(arguments, labels, running.device, adapts=False, quiet=running.quiet))
        save_text_embeddings(target.output, head, name)
        if not running.quiet:
            about = f"{len(head.texts.names)} classes by {len(head.texts.templates)} templates"
            typer.echo(f"{target.output}: {about}", err=True)
