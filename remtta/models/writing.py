"""A model's weights under the names that its checkpoints have."""

from __future__ import annotations

from torch import Tensor, nn

from remtta.errors import ModelError
from remtta.models.zero_shot import ZeroShotHead


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state of a model, as `load_model` takes it from a checkpoint.

    Of a zero-shot model that is open_clip's, its text tower in it; of an image
    tower with text embeddings, timm's, whose classifier is the projection.

    Raises:
        ModelError: If open_clip has no place for one of the weights.
    """
    state: dict[str, Tensor] = model.state_dict()
    for place, head in model.named_modules():
        if isinstance(head, ZeroShotHead):
            return _timms(state, place) if head.texts.source is None else _open_clips(state, place, head)
    return state


def _timms(state: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    projection = f"{place}.projection."
    return {
        name.replace(projection, f"{place}."): tensor
        for name, tensor in state.items()
        if name.startswith(projection) or not name.startswith(f"{place}.")
    }


def _open_clips(state: dict[str, Tensor], place: str, head: ZeroShotHead) -> dict[str, Tensor]:
    written: dict[str, Tensor] = dict(head.texts.tower.model.state_dict())
    names = head.texts.image_names
    for name, tensor in state.items():
        if name in names:
            written[f"visual.{names[name]}"] = _in_shape(names[name], tensor)
        elif not name.startswith(f"{place}.") and tensor.any():
            raise ModelError(f"open_clip's image tower has no {name}, which a delta changes, and cannot be written")
    return written


def _in_shape(name: str, tensor: Tensor) -> Tensor:
    """A weight of timm's ViT as open_clip's has it."""
    if name == "proj":
        return tensor.T
    return tensor[0].squeeze(0) if name in ("class_embedding", "positional_embedding") else tensor
