"""Save and load class embeddings, for image towers without a text tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.errors import CheckpointError, ModelError
from remtta.models.tensor_files import UNREADABLE, read_tensors, save_tensors
from remtta.models.unwrapping import classifiers_of
from remtta.models.zero_shot import ClassTexts, ZeroShotHead

_FORMAT = "remtta text embeddings"
_EMBEDDINGS, _SCALE, _BIAS = "embeddings", "logit_scale", "logit_bias"


def save_text_embeddings(path: Path, head: ZeroShotHead, model: str) -> None:
    """Write a zero-shot head's class embeddings, scale, bias and their origin; raise OutputError if that fails."""
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
    save_tensors(path, {name: tensor.detach().cpu() for name, tensor in tensors.items()}, about)


def _read(path: str | Path) -> tuple[dict[str, Tensor], ClassTexts]:
    try:
        about, tensors = read_tensors(path)
    except UNREADABLE as error:
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
        raise CheckpointError(f"--text-embeddings: {path} is damaged: names and embeddings do not match")
    return tensors, texts


def classify_by_texts(model: Any, name: str, path: str | Path) -> list[str]:
    """Make a timm image tower classify by the embeddings in a file, in place; return the class names.

    A classifier with as many outputs as the embeddings' size is used as the projection; one that was removed means
    there is none. Raise CheckpointError if the file is invalid; ModelError if the model's embeddings have another size.
    """
    tensors, texts = _read(path)
    place, projection = next(iter(classifiers_of(model).items()), ("", None))
    width = getattr(projection, "out_features", model.num_features)
    if projection is None or width != tensors[_EMBEDDINGS].shape[1]:
        raise ModelError(
            f"{name} has image embeddings of size {width}, and {path} has class embeddings of size "
            f"{tensors[_EMBEDDINGS].shape[1]}; use the image tower that belongs to the text tower"
        )
    head = ZeroShotHead(projection, tensors[_EMBEDDINGS].float(), tensors[_SCALE], tensors[_BIAS], texts)
    model.set_submodule(place, head)
    model.num_classes = len(texts.names)
    return list(texts.names)
