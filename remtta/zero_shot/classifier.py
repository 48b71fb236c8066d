"""The head of a zero-shot model, whose classes are text embeddings of their names, and the file of these."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.errors import CheckpointError, ModelError
from remtta.models.metadata import TimmModel
from remtta.models.tensor_files import UNREADABLE, read_tensors, save_tensors
from remtta.models.unwrapping import classifiers_of
from remtta.models.weights import within
from remtta.zero_shot.text_tower import TextTower

_FORMAT = "remtta text embeddings"
_EMBEDDINGS, _SCALE, _BIAS = "embeddings", "logit_scale", "logit_bias"


@dataclass(frozen=True)
class ClassTexts:
    """The class names, and the text tower that embeds them."""

    names: tuple[str, ...]
    templates: tuple[str, ...]  # sentences with a placeholder for a name
    source: TextTower | None
    sha256: bytes  # of the tower's weights, names and templates, 32 bytes
    image_names: Mapping[str, str] = field(default_factory=dict)  # image tower weights: timm to open_clip

    @property
    def tower(self) -> TextTower:
        """The text tower; raises ModelError if there is none."""
        if self.source is None:
            raise ModelError(
                "the method needs a text tower, which --text-embeddings do not include; use the whole model, such as "
                "clip:ViT-B-16/openai"
            )
        return self.source


class ZeroShotHead(nn.Module):
    """Logits from the cosine between an image's embedding and each class's: scale * image . class + bias.

    The normalised class embeddings (C, E) are not parameters, so no method trains them. A state contains the hash of
    their origin instead, since their last bits differ between machines. Sums are in fp32 whatever the precision. The
    projection maps the tower's pooled features (B, D) to (B, E); the scale is not logarithmic, and the bias is 0 in
    CLIP.

    SigLIP's sigmoid of each logit is left to the caller: predictions and entropies use the softmax over the classes.
    """

    scale: Tensor
    bias: Tensor
    embeddings: Tensor

    def __init__(
        self, projection: nn.Module, embeddings: Tensor, scale: Tensor, bias: Tensor, texts: ClassTexts
    ) -> None:
        super().__init__()
        self.projection = projection
        self.texts = texts
        self.register_buffer("scale", scale.detach().float().reshape(()).clone())
        self.register_buffer("bias", bias.detach().float().reshape(()).clone())
        self.register_buffer("text_sha256", torch.frombuffer(bytearray(texts.sha256), dtype=torch.uint8))
        self.register_buffer("embeddings", embeddings, persistent=False)
        self._embeds = False

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (B, C) of pooled features (B, D); within `embedding`, the images' embeddings (B, E)."""
        image = self.projection(features).float()
        return image if self._embeds else self.logits(F.normalize(image, dim=-1))

    def logits(self, image: Tensor) -> Tensor:
        """Return the logits (B, C) of images' normalised embeddings (B, E)."""
        with torch.autocast(image.device.type, enabled=False):
            return self.scale * image @ self.embeddings.T + self.bias

    @contextlib.contextmanager
    def embedding(self) -> Iterator[None]:
        """Return embeddings (B, E) of images, not normalised, in place of logits within the block."""
        self._embeds = True
        try:
            yield
        finally:
            self._embeds = False

    @contextlib.contextmanager
    def using(self, embeddings: Tensor) -> Iterator[None]:
        """Use other class embeddings (C, E) within the block."""
        original = self.embeddings
        self.embeddings = embeddings.to(original)
        try:
            yield
        finally:
            self.embeddings = original

    def restricted(self, numbers: Sequence[int]) -> ZeroShotHead:
        """Return a head with some of the classes, in this order, that shares the projection."""
        rows = torch.tensor(list(numbers))
        texts = replace(self.texts, names=tuple(self.texts.names[number] for number in numbers))
        head = ZeroShotHead(
            self.projection, self.embeddings[rows.to(self.embeddings.device)], self.scale, self.bias, texts
        )
        return head.to(self.scale.device)

    def checkpoint_state(self, state: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
        """Return the state in open_clip's layout with the text tower; with text embeddings alone, that of timm's image
        tower, with the projection as classifier. Raise ModelError if open_clip has no place for one of the weights.
        """
        projection = f"{path}.projection."
        tower = {name: tensor for name, tensor in state.items() if not name.startswith(f"{path}.")}
        if self.texts.source is None:
            return tower | {f"{path}.{name}": tensor for name, tensor in within(projection, state).items()}
        converted: dict[str, Tensor] = dict(self.texts.source.model.state_dict())
        for name, theirs in self.texts.image_names.items():
            tensor = state[name]
            if theirs in ("class_embedding", "positional_embedding"):
                tensor = tensor[0].squeeze(0)
            converted[f"visual.{theirs}"] = tensor.T if theirs == "proj" else tensor
        if others := [name for name in tower if name not in self.texts.image_names and tower[name].any()]:
            raise ModelError(
                f"open_clip's image tower has no {others[0]}, which a delta changes, and cannot be written"
            )
        return converted


def zero_shot_head(model: nn.Module) -> ZeroShotHead:
    """Return a zero-shot model's head; raise ModelError if the model has none."""
    head = next((module for module in model.modules() if isinstance(module, ZeroShotHead)), None)
    if head is None:
        raise ModelError(
            "the method is for zero-shot models, and this model has a head of its own; name one such as "
            "clip:ViT-B-16/openai"
        )
    return head


def save_text_embeddings(path: Path, head: ZeroShotHead, model: str) -> None:
    """Write a zero-shot head's class embeddings, scale, bias and their origin; raise OutputError if that fails."""
    texts = head.texts
    header = {
        "format": _FORMAT,
        "model": model,
        "names": json.dumps(texts.names),
        "prompts": json.dumps(texts.templates),
        "text_tower_sha256": texts.tower.sha256,
        "texts_sha256": texts.sha256.hex(),
    }
    tensors = {_EMBEDDINGS: head.embeddings, _SCALE: head.scale, _BIAS: head.bias}
    save_tensors(path, {name: tensor.detach().cpu() for name, tensor in tensors.items()}, header)


def _read_text_embeddings(path: str | Path) -> tuple[dict[str, Tensor], ClassTexts]:
    try:
        header, tensors = read_tensors(path)
    except UNREADABLE as error:
        raise CheckpointError(f"--text-embeddings: {path} cannot be read: {error}") from error
    if header.get("format") != _FORMAT:
        raise CheckpointError(f"--text-embeddings: {path} was not written by remtta text-embed")
    try:
        names, templates = (tuple(map(str, json.loads(header[name]))) for name in ("names", "prompts"))
        texts = ClassTexts(names, templates, None, bytes.fromhex(header["texts_sha256"]))
        match = tensors[_EMBEDDINGS].ndim == 2 and len(tensors[_EMBEDDINGS]) == len(names)
        valid = match and all(tensors[name].isfinite().all() for name in (_EMBEDDINGS, _SCALE, _BIAS))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"--text-embeddings: {path} is damaged: {error!r}") from error
    if not valid:
        raise CheckpointError(f"--text-embeddings: {path} is damaged: names and embeddings do not match")
    return tensors, texts


def classify_by_texts(model: TimmModel, name: str, path: str | Path) -> list[str]:
    """Make a timm image tower classify by the embeddings in a file, in place; return the class names.

    A classifier with as many outputs as the embeddings' size is used as the projection; one that was removed means
    there is none. Raise CheckpointError if the file is invalid; ModelError if the model's embeddings have another size.
    """
    tensors, texts = _read_text_embeddings(path)
    path_of_head, projection = next(iter(classifiers_of(model).items()), ("", None))
    width = getattr(projection, "out_features", model.num_features)
    if projection is None or width != tensors[_EMBEDDINGS].shape[1]:
        raise ModelError(
            f"{name} has image embeddings of size {width}, and {path} has class embeddings of size "
            f"{tensors[_EMBEDDINGS].shape[1]}; use the image tower that belongs to the text tower"
        )
    head = ZeroShotHead(projection, tensors[_EMBEDDINGS].float(), tensors[_SCALE], tensors[_BIAS], texts)
    model.set_submodule(path_of_head, head)
    model.num_classes = len(texts.names)
    return list(texts.names)
