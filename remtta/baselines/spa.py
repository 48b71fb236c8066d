"""SPA: predictions of degraded views follow the plain one (Niu et al., ICML 2025, arXiv:2504.08010)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.baselines.augmentations import without_low_frequencies
from remtta.baselines.predictor import PredictorConfig, WithPredictor
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Targets
from remtta.methods.settings.base import NonNegative, Positive, PositiveShare, Share
from remtta.models.preprocessing import preprocessing_of

_NOISE = "noise"
_CELL = 16  # side of a square with the same amount of noise, in pixels


@dataclass(frozen=True)
class SPAConfig(PredictorConfig):
    """Settings of SPA; the defaults are the official code's for ViT-B, at a batch of 64.

    Attributes:
        masked: Share of the low frequencies that one view lacks.
        noise: Mean share of noise in the other view.
        noise_lr: Learning rate of the noise in each square, which grows where it raises the loss.
    """

    masked: Share = 0.2
    noise: PositiveShare = 0.4
    noise_lr: NonNegative = 1.0
    predictor_lr: Positive = 5.0
    lr: Positive = 1e-2
    unused = ("micro_batch",)  # the two views' losses are means over different images


class SPA(WithPredictor[SPAConfig]):
    """Predict a batch, then train two degraded views of it, behind the predictor, towards the prediction.

    One view lacks random low frequencies; the other is mixed with noise, by a share per square of 16 x 16 pixels that
    learns to raise the loss. The loss of a view is the mean Kullback-Leibler divergence from the prediction, over the
    images of which the view is less confident than the prediction.
    """

    settings = SPAConfig
    passes_per_step = 3, 2

    def __init__(self, model: AdaptedModel, config: SPAConfig) -> None:
        super().__init__(model, config)
        rows, columns = (math.ceil(side / _CELL) for side in preprocessing_of(model.model).input_size)
        self.beside[_NOISE] = torch.zeros(rows, columns, device=model.device, dtype=torch.float32)
        self.trained = {**self.trained, _NOISE: self.beside[_NOISE]}

    def parameter_groups(self) -> list[dict[str, object]]:
        return [*super().parameter_groups(), {"params": [self.beside[_NOISE]], "lr": self.config.noise_lr}]

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.beside[_NOISE].fill_(math.sqrt(self.config.noise))

    def keeps_graph(self, batch_size: int) -> bool:
        return False  # the prediction has no gradient

    def predict_with_targets(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        targets = self.targets(images, None)
        return targets[0].clone(), targets

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        return (self.in_parts(self.forward, images),)

    def loss(self, images: Tensor, center: Center, plain: Tensor) -> LossOutput:
        plain = center(plain)
        masked = without_low_frequencies(images, self.config.masked, self.model.generator)
        views = [center(self.both_logits(view)[1]) for view in (masked, self.noised(images))]
        terms = []
        for logits in views:
            unsure = plain.softmax(-1).amax(-1) > logits.detach().softmax(-1).amax(-1)
            if unsure.any():
                p, log_q = plain[unsure].softmax(-1), logits[unsure].log_softmax(-1)
                terms.append(F.kl_div(log_q, p, reduction="batchmean"))
        loss = torch.stack(terms).sum() if terms else plain.new_zeros(())
        return LossOutput(torch.stack([plain, *views]), loss, len(images) if terms else 0)

    def noised(self, images: Tensor) -> Tensor:
        """Return images (B, 3, H, W) mixed with the same noise, clipped to valid pixels."""
        drawn = torch.randn(images.shape[1:], generator=self.model.generator, dtype=torch.float32).to(images)
        alpha = self.beside[_NOISE]
        share = (2 * alpha.detach() - alpha).square()  # the gradient's sign is changed: a step raises the loss
        share = F.interpolate(share[None, None], images.shape[2:], mode="nearest")
        low, high = (self.model.pixels.normalise(torch.full((1, 3, 1, 1), each).to(images)) for each in (0.0, 1.0))
        return torch.lerp(images, drawn, share).clamp(low, high)

    @torch.no_grad()
    def after_step(self) -> None:
        alpha = self.beside[_NOISE]
        alpha.div_((alpha.square().mean() / self.config.noise).sqrt()).clamp_(-1, 1)
