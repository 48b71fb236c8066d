"""timm's NaFlexVit, which accepts images of any size and aspect ratio that its patches divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from timm.models.naflexvit import NaFlexVit
from torch import Tensor

from remtta.backbones.eva import RotaryViT
from remtta.errors import ModelError, UsageError
from remtta.models.preprocessing import preprocessing_of


class FlexibleViT(RotaryViT):
    """A timm NaFlexVit on batches of equally sized images, with linear patch embedding and without padding."""

    architecture = NaFlexVit
    kinds: ClassVar[Mapping[str, str]] = {
        "NaFlex ViT, average pooling": "naflexvit_base_patch16_gap",
        "NaFlex ViT, attention pooling": "naflexvit_base_patch16_map",
    }

    def __init__(self, module: NaFlexVit) -> None:
        super().__init__(module)
        self._embeds: Any = module.embeds
        if not self._embeds.is_linear or self._embeds.dynamic_img_pad:
            raise ModelError(
                "this NaFlexVit embeds patches by a convolution or pads images, which remtta does not support"
            )

    @property
    def num_patches(self) -> int:
        sizes = zip(preprocessing_of(self.module).input_size, self.patch_size, strict=True)
        rows, columns = (whole // part for whole, part in sizes)
        return rows * columns

    @property
    def patch_size(self) -> tuple[int, int]:
        height, width = self._embeds.patch_size
        return int(height), int(width)

    @property
    def input_size(self) -> tuple[int, int] | None:
        return None  # any size that the patches divide

    def embed_patches(self, images: Tensor) -> Tensor:
        """Return patches (B, rows, columns, D).

        Raises:
            UsageError: If the patches do not divide the images.
        """
        height, width = self.patch_size
        if images.shape[2] % height or images.shape[3] % width:
            size = "x".join(map(str, images.shape[2:]))
            raise UsageError(
                f"images of {size} pixels do not divide into patches of {height}x{width}; choose another --input-size"
            )
        cut = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, 3, rows, height, columns, width)
        last = getattr(self._embeds, "channels_last", True)  # always so in older versions of timm
        pixels = cut.permute(0, 2, 4, 3, 5, 1) if last else cut.permute(0, 2, 4, 1, 3, 5)
        pixels = pixels.flatten(3)
        if self._embeds.norm_input is not None:
            pixels = self._embeds.norm_input(pixels)
        return self._embeds.norm(self._embeds.proj(pixels))

    def _placed(self, patches: Tensor) -> tuple[Tensor, Tensor | None]:
        embeds, grid = self._embeds, list(patches.shape[1:3])
        tokens = patches.flatten(1, 2).clone()  # timm adds the positions in place
        if embeds.pos_embed_type == "learned":
            embeds._apply_learned_pos_embed(tokens, grid_size=grid)
        elif embeds.pos_embed_type == "factorized":
            embeds._apply_factorized_pos_embed(tokens, grid_size=grid)
        prefix = [t.expand(len(tokens), -1, -1) for t in (embeds.cls_token, embeds.reg_token) if t is not None]
        rope = None if self.module.rope is None else self.module.rope.get_embed(shape=grid)
        return self.module.norm_pre(torch.cat([*prefix, tokens], dim=1)), rope

    @property
    def _has_class_token(self) -> bool:
        return self._embeds.cls_token is not None

    @property
    def _mixed(self) -> bool:
        return bool(self.module.rope_is_mixed)

    def _run(self, block: Any, tokens: Tensor, place: Tensor | None) -> Tensor:
        return block(tokens) if place is None else block(tokens, rope=place)
