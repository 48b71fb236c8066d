"""Any image classifier; a trace of one image decides whether tokens or pixels are masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.attention import AttentionRows
from remtta.backbones.backbone import Backbone, BatchNorm, Scores
from remtta.backbones.batchnorm import batch_norms
from remtta.backbones.structure import Structure, infer_structure, logits_of_kept, with_input
from remtta.errors import ModelError
from remtta.models.metadata import Size
from remtta.models.unwrapping import UnwrappedModel

_LIBRARIES = "timm", "torchvision"
_LIVE_TENSORS = 4  # of the largest size that a layer holds at a time


class AnyClassifier(Backbone):
    """A classifier with its own forward pass; hooks drop patch tokens, or patches of the image are set to zero.

    Its blocks and its stem are found, unless their module paths are given.
    """

    def __init__(self, model: UnwrappedModel, blocks: Sequence[str] = (), stem: Sequence[str] = ()) -> None:
        self.module, self._model, self._blocks, self._stem = model.module, model, blocks, stem

    @cached_property
    def _structure(self) -> Structure:
        return infer_structure(self._model, self._blocks, self._stem)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self.module.get_submodule(path) for path in self._structure.blocks]

    def parts(self, number: int) -> Sequence[nn.Module]:
        stem = [self.module.get_submodule(path) for path in self._structure.stem] if number == 0 else []
        return [*stem, self.blocks[number]]

    @property
    def channel_axis(self) -> int:
        return self._structure.channel_axis if self._structure.num_prefix_tokens is None else -1

    @property
    def batch_norms(self) -> Mapping[str, BatchNorm]:
        return batch_norms(self.module)

    @property
    def num_patches(self) -> int:
        return math.prod(self._structure.grid)

    @property
    def patch_size(self) -> Size:
        (height, width), (rows, columns) = self._model.trace.inner_size, self._structure.grid
        return math.ceil(height / rows), math.ceil(width / columns)

    @property
    def num_tokens(self) -> int:
        """Tokens, or positions of the feature map, after the first block."""
        shape = self._model.trace.shapes.get(self._structure.blocks[0], ((), ()))[1] if self._structure.blocks else ()
        return max(self.num_patches, math.prod(shape[1:]) // shape[self.channel_axis] if len(shape) > 2 else 0)

    @property
    def num_passing(self) -> int:
        return _LIVE_TENSORS * max(math.prod(left) for _, left in self._model.trace.shapes.values())

    @property
    def input_size(self) -> Size | None:
        return None if self._structure.num_prefix_tokens is None else self._model.trace.inner_size

    @property
    def num_classes(self) -> int:
        return super().num_classes if self._model.is_timm else self._model.trace.num_classes

    @property
    def classifiers(self) -> Mapping[str, nn.Module]:
        head = self._model.trace.head
        return super().classifiers if head is None else {head: self.module.get_submodule(head)}

    def embed(self, images: Tensor) -> Tensor:
        return images

    def count_patches(self, embedded: Tensor) -> int:
        return math.prod(self._grid(embedded))

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is None:
            return self.forward(embedded)
        prefix = self._structure.num_prefix_tokens
        if prefix is None:
            # The paper masks a CNN's input, but not with what value; zero after normalisation is the mean colour.
            # If the grid does not divide H or W, patches differ in size by a pixel.
            grid = self._grid(embedded)
            mask = embedded.new_zeros(len(kept), math.prod(grid)).scatter_(1, kept, 1.0)
            return self.forward(embedded * F.interpolate(mask.view(-1, 1, *grid), embedded.shape[2:], mode="nearest"))
        return logits_of_kept(self._model, self.blocks[0], embedded, kept, prefix)

    def forward(self, images: Tensor) -> Tensor:
        if self._takes_channels_last and images.device.type == "cpu":
            images = images.contiguous(memory_format=torch.channels_last)
        return self._model.logits(images)

    @cached_property
    def _takes_channels_last(self) -> bool:
        """True if the channels-last format is faster (on CPUs), and safe: models of others may call `view` on maps."""
        return bool(self.batch_norms) and type(self.module).__module__.partition(".")[0] in _LIBRARIES

    def check_scores(self, scores: Scores) -> None:
        structure = self._structure
        has_map = structure.feature_map is not None
        others = {"features": has_map or structure.num_prefix_tokens is not None, "gradcam": has_map}
        if not {"attention": structure.attends, **others}[scores]:
            available = [name for name, there in others.items() if there]
            raise ModelError(
                f"{type(self.module).__name__} has no patch scores for --set masking={scores}; "
                f"leave it out, or choose {' or '.join([*available, 'random'])}"
            )

    def classify_with_scores(self, embedded: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and a score (B, N) of each patch.

        "attention" is that of the first token, "features" the L2 norm of the tokens entering the last block or of the
        last map's features, and "gradcam" the contribution of that map's features to the predicted class.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, "Experiments on Different Network Architectures".
        """
        structure = self._structure
        if scores == "attention":
            assert structure.num_prefix_tokens is not None
            with AttentionRows(structure.num_prefix_tokens + self.num_patches) as attention:
                logits = self.forward(embedded)
            return logits, attention.rows[-1][:, structure.num_prefix_tokens :]
        if scores == "gradcam":
            return self._with_gradcam(embedded)
        if structure.feature_map is None:
            logits, tokens = with_input(self._model, self.blocks[-1], embedded)
            return logits, tokens[:, structure.num_prefix_tokens :].detach().float().norm(dim=-1)
        logits, features = self._with_map(embedded)
        return logits, self._on_patches(features.detach().float().norm(dim=structure.channel_axis), embedded)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        for head in self.classifiers.values():
            logits, features = with_input(self._model, head, images)
            return logits, features.flatten(1)
        raise ModelError(f"no linear layer makes the logits of {type(self.module).__name__}, so it has no features")

    @torch.inference_mode(False)  # the caller may be inside one
    def _with_gradcam(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and Grad-CAM (B, N) of the predicted class over the last feature map.

        Each channel is weighted by the gradient of the class's logit, averaged over all positions. Grad-CAM then clips
        negative values; that is left out, since it only creates ties in the order.

        Source: Grad-CAM, arXiv:1610.02391, Eq. 1 and 2.
        """
        keeps_graph, axis = torch.is_grad_enabled(), self.channel_axis
        with torch.enable_grad():
            logits, features = self._with_map(images.clone() if images.is_inference() else images)
            (gradient,) = torch.autograd.grad(logits.float().amax(-1).sum(), features, retain_graph=keeps_graph)
        weights = gradient.movedim(axis, -1).flatten(1, 2).float().mean(1)[:, None, None]  # (B, 1, 1, D)
        scores = (weights * features.detach().movedim(axis, -1).float()).sum(-1)
        return logits if keeps_graph else logits.detach(), self._on_patches(scores, images)

    def _with_map(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and the last feature map; with gradients on, logits can be differentiated by it."""
        maps: list[Tensor] = []

        def record(layer: nn.Module, inputs: object, output: Tensor) -> None:
            needs = torch.is_grad_enabled() and not output.requires_grad
            maps.append(output.requires_grad_() if needs else output)

        assert self._structure.feature_map is not None
        with self.module.get_submodule(self._structure.feature_map).register_forward_hook(record):
            return self.forward(images), maps[-1]

    def _on_patches(self, scores: Tensor, images: Tensor) -> Tensor:
        """Resize scores (B, rows, columns) of a feature map to the image's patches: (B, N)."""
        grid = self._grid(images)
        if scores.shape[1:] != grid:
            scores = F.interpolate(scores.unsqueeze(1), grid, mode="bilinear", align_corners=False).squeeze(1)
        return scores.flatten(1)

    def _grid(self, images: Tensor) -> Size:
        (height, width), (rows, columns) = self.patch_size, images.shape[2:]
        return math.ceil(rows / height), math.ceil(columns / width)
