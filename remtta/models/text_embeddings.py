"""Class embeddings in a file, for image towers that have no text tower beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remtta.errors import CheckpointError, ModelError
from remtta.files import write_atomically
from remtta.models.zero_shot import ClassTexts, ZeroShotHead

_FORMAT = "remtta text embeddings"
_EMBEDDINGS, _SCALE, _BIAS = "embeddings", "logit_scale", "logit_bias"


def save_text_embeddings(path: Path, head: ZeroShotHead, model: str) -> None:
    """Write a head's class embeddings, its scale and bias, and what they were made from.

    Args:
        path: The .safetensors file.
        head: The head of a zero-shot model.
        model: That model's name.

    Raises:
        OutputError: If the file cannot be written.
    """
    texts = head.texts
    about = {
        "format": _FORMAT,
        "model": model,
        "names": json.dumps(texts.names),
        "prompts": json.dumps(texts.templates),
        "text_tower_sha256": texts.tower.sha256,
        "texts_sha256": texts.sha256.hex(),
    }
    tensors = {_EMBEDDINGS: head.embeddings, _SCALE: head.scale, _BIAS: head.bias}
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda place: save_file(content, place, metadata=about))


def read_text_embeddings(path: str | Path) -> tuple[dict[str, Tensor], ClassTexts]:
    """What `save_text_embeddings` wrote: its tensors, and whose they are.

    Raises:
        CheckpointError: If it is no such file, or does not go together.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, as it is no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"--text-embeddings: {path} cannot be read: {error}") from error
    if about.get("format") != _FORMAT:
        raise CheckpointError(f"--text-embeddings: {path} was not written by remtta text-embed")
    try:
        names, templates = (tuple(map(str, json.loads(about[name]))) for name in ("names", "prompts"))
        texts = ClassTexts(names, templates, None, bytes.fromhex(about["texts_sha256"]))
        fits = tensors[_EMBEDDINGS].ndim == 2 and len(tensors[_EMBEDDINGS]) == len(names)
        whole = fits and all(tensors[name].isfinite().all() for name in (_EMBEDDINGS, _SCALE, _BIAS))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"--text-embeddings: {path} is damaged: {error!r}") from error
    if not whole:
        raise CheckpointError(f"--text-embeddings: {path} is damaged: names and embeddings do not go together")
    return tensors, texts


def classify_by_texts(model: Any, name: str, path: str | Path) -> list[str]:
    """Have a timm image tower, whose classifier is the way to embeddings, classify by those of a file; in place.

    Args:
        model: The timm model. A classifier of as many numbers as an embedding
            has is their projection, and one that is left out none.
        name: What it is called.
        path: The file.

    Returns:
        The class names.

    Raises:
        CheckpointError: If the file is none of these.
        ModelError: If the model's embeddings are of another size.
    """
    tensors, texts = read_text_embeddings(path)
    projection = model.get_classifier()
    place = next((each for each, module in model.named_modules() if module is projection), "")
    width = getattr(projection, "out_features", model.num_features)
    if not place or width != tensors[_EMBEDDINGS].shape[1]:
        raise ModelError(
            f"{name} gives {width} numbers per image and {path} has {tensors[_EMBEDDINGS].shape[1]} per class; "
            "take the image tower of the model that the texts were embedded by"
        )
    head = ZeroShotHead(projection, tensors[_EMBEDDINGS].float(), tensors[_SCALE], tensors[_BIAS], texts)
    model.set_submodule(place, head)
    model.num_classes = len(texts.names)
    return list(texts.names)
