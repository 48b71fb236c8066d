"""LAME: correct a batch's predictions without changing the model (Boudiaf et al., CVPR 2022, arXiv:2201.05718)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, BatchNorms, Count, MethodConfig
from remtta.methods.source import Source

_MAX_STEPS = 100
_TOLERANCE = 1e-8  # relative change of the objective at convergence


@dataclass(frozen=True)
class LAMEConfig(MethodConfig):
    """Settings of LAME, which takes no steps: of the shared ones only micro_batch and precision are used.

    Attributes:
        neighbours: Number of nearest neighbours in the batch that attract a prediction.
    """

    neighbours: Count = 5
    bn: BatchNorms = "running"
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "center")


class LAME(Source[LAMEConfig]):
    """Correct predictions so that images with similar features get similar predictions; no weight changes.

    It returns log-probabilities, whose softmax is the corrected prediction. A batch of one is predicted unchanged.
    Micro-batches split the forward passes; the correction uses the whole batch. Raise ModelError if the model's
    architecture is unknown.
    """

    settings = LAMEConfig
    delta_refusal = "LAME corrects predictions and changes no weights"

    @torch.no_grad()
    def predict(self, images: Tensor, *, learn: bool = False, counted: bool = True, latency: bool = False) -> Tensor:
        """Return corrected log-probabilities (B, C) of preprocessed images (B, 3, H, W)."""
        split = images.split(self.model.part_size(len(images)))
        with self.model.context(images.device):
            parts = [self.model.backbone.classify_with_features(part) for part in split]
        logits, features = (torch.cat(rows).float() for rows in zip(*parts, strict=True))
        affinity = neighbour_affinity(features, self.config.neighbours)
        return laplacian_correction(logits.log_softmax(-1), affinity)


def neighbour_affinity(features: Tensor, neighbours: int) -> Tensor:
    """Return 1 where an image is among another's nearest neighbours by the cosine of features (B, D), else 0; shape (B,
    B).

    Each image has `neighbours` neighbours, itself excluded; all others in a smaller batch.
    """
    unit = F.normalize(features, dim=-1)
    similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(neighbours, len(features) - 1), dim=-1).indices
    return torch.zeros_like(similarity).scatter_(1, nearest, 1.0)


def laplacian_correction(log_probs: Tensor, affinity: Tensor) -> Tensor:
    """Return log-assignments (B, C) close to log-predictions (B, C) and similar among neighbours, by affinities (B, B).

    Minimises sum_i KL(z_i, q_i) - sum_ij w_ij z_i . z_j over distributions z_i by the concave-convex procedure: each
    step sets z_i proportional to q_i exp(sum_j w_ij z_j). Uses double precision, since in single precision rounding
    would decide which step is the last.
    """
    given, log_probs, affinity = log_probs, log_probs.cpu().double(), affinity.cpu().double()  # MPS has no doubles
    log_z, earlier = log_probs, math.nan  # NaN differs from every objective
    for _ in range(_MAX_STEPS):
        pull = affinity @ log_z.exp()
        log_z = (log_probs + pull).log_softmax(-1)
        z = log_z.exp()
        objective = float((z * (log_z - log_probs)).sum() - (z * (affinity @ z)).sum())
        if abs(objective - earlier) <= _TOLERANCE * abs(earlier):
            break
        earlier = objective
    return log_z.to(given)
