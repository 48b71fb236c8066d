"""LAME: correct a batch's predictions without changing the model (Boudiaf et al., CVPR 2022, arXiv:2201.05718)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, Count, MethodConfig
from remtta.methods.source import Source

Affinity = Literal["knn", "rbf", "linear"]
_MAX_STEPS = 100
_TOLERANCE = 1e-8  # relative change of the objective at convergence


@dataclass(frozen=True)
class LAMEConfig(MethodConfig):
    """Settings of LAME, which takes no steps: of the shared ones only micro_batch and precision are used.

    Attributes:
        affinity: What attracts a prediction: "knn", its nearest neighbours in the batch, as in the paper; "rbf", all
            images by a Gaussian of the distance, the official code's default; "linear", all images by the cosine of the
            features.
        neighbours: Number of nearest neighbours for "knn". For "rbf" the Gaussian's standard deviation is the mean
            distance to the neighbour of this rank, the image itself being the first. Unused by "linear".
    """

    affinity: Affinity = "knn"
    neighbours: Count = 5
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "centre")


class LAME(Source[LAMEConfig]):
    """Correct predictions so that images with similar features get similar predictions; no weight changes.

    It returns log-probabilities, whose softmax is the corrected prediction. With nearest neighbours, a batch of one is
    predicted unchanged; with a dense affinity each image is its own neighbour, too, and becomes more confident.
    Micro-batches split the forward passes; the correction uses the whole batch.

    Raises:
        ModelError: If the model's architecture is unknown.
    """

    settings = LAMEConfig
    delta_refusal = "LAME corrects predictions and changes no weights"

    def predict(self, images: Tensor) -> Tensor:
        """Return corrected log-probabilities (B, C) of preprocessed images (B, 3, H, W)."""
        features, logits = [], []
        for part in images.split(self.config.micro_batch or len(images)):
            with self.net.context(images.device):
                predicted, feature = self.net.backbone.classify_with_features(part)
            logits.append(predicted.float())
            features.append(feature.float())
        return laplacian_correction(torch.cat(logits).log_softmax(-1), self._affinity(torch.cat(features)))

    def _affinity(self, features: Tensor) -> Tensor:
        """Return the affinities (B, B) between images, from their features (B, D)."""
        if self.config.affinity == "linear":
            return cosine_affinity(features)
        if self.config.affinity == "rbf":
            return gaussian_affinity(features, self.config.neighbours)
        return neighbour_affinity(features, self.config.neighbours)


def neighbour_affinity(features: Tensor, neighbours: int) -> Tensor:
    """Return 1 where an image is among another's nearest neighbours by the cosine of features (B, D), else 0; shape (B,
    B).

    Each image has `neighbours` neighbours, itself excluded; all others in a smaller batch.
    """
    similarity = cosine_affinity(features).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(neighbours, len(features) - 1), dim=-1).indices
    return torch.zeros_like(similarity).scatter_(1, nearest, 1.0)


def gaussian_affinity(features: Tensor, neighbours: int) -> Tensor:
    """Return exp(-d^2 / (2 s^2)), shape (B, B), with d the distance between the normalised features (B, D) of two
    images.

    s is the mean distance to the `neighbours`-th nearest image, counting the image itself as the first; to the farthest
    in a smaller batch. If s is 0, only images with equal features have an affinity.
    """
    unit = F.normalize(features, dim=-1)
    distances = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")  # exact for equal features
    nearest = distances.topk(min(neighbours, len(features)), dim=-1, largest=False).values
    scale = nearest[:, -1].mean().clamp(min=torch.finfo(distances.dtype).tiny)
    return (-0.5 * (distances / scale).square()).exp()


def cosine_affinity(features: Tensor) -> Tensor:
    """Return the cosines (B, B) between images' features (B, D)."""
    unit = F.normalize(features, dim=-1)
    return unit @ unit.T


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
