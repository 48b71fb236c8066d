"""LAME: correct a batch's predictions, and leave the model alone (Boudiaf et al., CVPR 2022, arXiv:2201.05718)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.net import Net
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, Count, MethodConfig
from remtta.methods.source import Source

Affinity = Literal["knn", "rbf", "linear"]
_MAX_STEPS = 100
_TOLERANCE = 1e-8  # relative change of the objective at which the assignments have settled


@dataclass(frozen=True)
class LAMEConfig(MethodConfig):
    """Settings of LAME, which takes no step: of the shared ones only micro_batch and precision are used.

    Attributes:
        affinity: Whom a prediction is pulled to: "knn", its nearest neighbours in
            the batch, as the paper has it; "rbf", everybody by a Gaussian of
            the distance, the official code's default; "linear", everybody by
            the cosine of the features.
        neighbours: Nearest neighbours for "knn". For "rbf" the Gaussian's
            deviation is the mean distance to the one of this number, the image
            itself being the first. "linear" has no use for it.
    """

    affinity: Affinity = "knn"
    neighbours: Count = 5
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic")


class LAME(Source[LAMEConfig]):
    """Predict so that images with near features get near predictions; no weight changes.

    What is returned are log-probabilities: their softmax is the corrected
    prediction. By nearest neighbours, a batch of one is predicted as it is; by
    a dense affinity each image is near itself, too, and grows more certain.
    Micro-batches split the forward passes; the correction sees the whole batch.

    Raises:
        ModelError: If the model is of an unknown architecture.
    """

    settings = LAMEConfig
    is_source = False
    delta_refusal = "LAME corrects predictions and changes no weights"

    def __init__(self, net: Net, config: LAMEConfig) -> None:
        super().__init__(net, config)
        self._backbone = net.backbone

    def predict(self, images: Tensor) -> Tensor:
        """Return corrected log-probabilities (B, C) of preprocessed images (B, 3, H, W)."""
        features, logits = [], []
        for part in images.split(self.config.micro_batch or len(images)):
            with self.net.context(images.device):
                predicted, feature = self._backbone.classify_with_features(part)
            logits.append(self.net.plain(predicted))
            features.append(feature.float())
        return laplacian_correction(torch.cat(logits).log_softmax(-1), self._affinity(torch.cat(features)))

    def _affinity(self, features: Tensor) -> Tensor:
        """How strongly each image's prediction is pulled to each other's (B, B), by their features (B, D)."""
        if self.config.affinity == "linear":
            return cosine_affinity(features)
        if self.config.affinity == "rbf":
            return gaussian_affinity(features, self.config.neighbours)
        return neighbour_affinity(features, self.config.neighbours)


def neighbour_affinity(features: Tensor, neighbours: int) -> Tensor:
    """Who is among whose nearest neighbours (B, B) by the cosine of features (B, D): 1 there, else 0.

    So many for each image, itself left out; all others in a smaller batch.
    """
    similarity = cosine_affinity(features).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(neighbours, len(features) - 1), dim=-1).indices
    return torch.zeros_like(similarity).scatter_(1, nearest, 1.0)


def gaussian_affinity(features: Tensor, neighbours: int) -> Tensor:
    """How near any two images are (B, B): exp(-d^2 / (2 s^2)), d the distance of their features (B, D) at length one.

    s is the mean over the images of the distance to the nearest one of this number, itself the first; the farthest in
    a smaller batch. Where s is 0, only images of one feature are near.
    """
    unit = F.normalize(features, dim=-1)
    distances = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")  # exact where they are 0
    nearest = distances.topk(min(neighbours, len(features)), dim=-1, largest=False).values
    scale = nearest[:, -1].mean().clamp(min=torch.finfo(distances.dtype).tiny)
    return (-0.5 * (distances / scale).square()).exp()


def cosine_affinity(features: Tensor) -> Tensor:
    """Cosines (B, B) of any two images' features (B, D)."""
    unit = F.normalize(features, dim=-1)
    return unit @ unit.T


def laplacian_correction(log_probs: Tensor, affinity: Tensor) -> Tensor:
    """Log-assignments (B, C) near log-predictions (B, C) and alike among neighbours, by affinities (B, B).

    Minimises sum_i KL(z_i, q_i) - sum_ij w_ij z_i . z_j over distributions z_i, by the concave-convex procedure: each
    step sets z_i proportional to q_i exp(sum_j w_ij z_j). In double precision: in single, rounding would decide which
    step is the last.
    """
    given, log_probs, affinity = log_probs, log_probs.double(), affinity.double()
    log_z, earlier = log_probs, math.nan  # which no objective equals
    for _ in range(_MAX_STEPS):
        pull = affinity @ log_z.exp()
        log_z = (log_probs + pull).log_softmax(-1)
        z = log_z.exp()
        objective = float((z * (log_z - log_probs)).sum() - (z * (affinity @ z)).sum())
        if abs(objective - earlier) <= _TOLERANCE * abs(earlier):
            break
        earlier = objective
    return log_z.to(given)
