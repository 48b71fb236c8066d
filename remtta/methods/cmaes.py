"""CMA-ES: minimise a function of many numbers by sampling, without its gradient.

Own code rather than a library's, because a stopped run goes on from tensors:
the libraries at hand save their state by pickle only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_STATE = ("mean", "sigma", "covariance", "path_sigma", "path_c", "axes", "scales", "counts")


class CMAES:
    """The covariance matrix adaptation evolution strategy with its default constants, on the CPU.

    Args:
        dim: Numbers to find; they start at mean 0 and deviation 1.
        population: Candidates per generation; 4 + floor(3 ln dim) if None.

    Source: The CMA Evolution Strategy: A Tutorial, arXiv:1604.00772; without negative weights.
    """

    def __init__(self, dim: int, population: int | None = None) -> None:
        self.dim, self.population = dim, population or 4 + math.floor(3 * math.log(dim))
        parents = self.population // 2
        raw = math.log((self.population + 1) / 2) - torch.arange(1, parents + 1, dtype=torch.float64).log()
        self._weights = raw / raw.sum()
        mass = self._mass = float(1 / self._weights.square().sum())
        self._c_sigma = (mass + 2) / (dim + mass + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (dim + 1)) - 1) + self._c_sigma
        self._c_c = (4 + mass / dim) / (dim + 4 + 2 * mass / dim)
        self._c_1 = 2 / ((dim + 1.3) ** 2 + mass)
        self._c_mu = min(1 - self._c_1, 2 * (mass - 2 + 1 / mass) / ((dim + 2) ** 2 + mass))
        self._expected_norm = math.sqrt(dim) * (1 - 1 / (4 * dim) + 1 / (21 * dim**2))
        # The axes are computed anew only when the covariance has moved enough for it to matter.
        self._renew_every = max(1, math.floor(1 / (10 * dim * (self._c_1 + self._c_mu))))
        self.reset()

    def reset(self) -> None:
        """Back to the first generation."""
        identity = torch.eye(self.dim, dtype=torch.float64)
        self.mean, self.sigma = torch.zeros(self.dim, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        self.covariance, self.axes = identity, identity.clone()
        self.scales = torch.ones(self.dim, dtype=torch.float64)
        self.path_sigma, self.path_c = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        self.counts = torch.zeros(2, dtype=torch.int64)  # generations, and the one the axes are from

    def ask(self, generator: torch.Generator) -> Tensor:
        """Candidates (population, dim), float64."""
        drawn = torch.randn(self.population, self.dim, dtype=torch.float64, generator=generator)
        return self.mean + self.sigma * (drawn * self.scales) @ self.axes.T

    def tell(self, candidates: Tensor, fitness: Tensor) -> None:
        """Move towards the candidates (population, dim) of least fitness (population,)."""
        best = fitness.double().argsort(stable=True)[: len(self._weights)]
        steps = (candidates[best] - self.mean) / self.sigma
        step = self._weights @ steps
        self.mean = self.mean + self.sigma * step
        generation = int(self.counts[0]) + 1
        whitened = self.axes @ ((self.axes.T @ step) / self.scales)
        c = self._c_sigma
        self.path_sigma = (1 - c) * self.path_sigma + math.sqrt(c * (2 - c) * self._mass) * whitened
        length = float(self.path_sigma.norm())
        settled = length / math.sqrt(1 - (1 - c) ** (2 * generation)) < (1.4 + 2 / (self.dim + 1)) * self._expected_norm
        c = self._c_c
        self.path_c = (1 - c) * self.path_c + settled * math.sqrt(c * (2 - c) * self._mass) * step
        kept = 1 - self._c_1 - self._c_mu + (not settled) * self._c_1 * c * (2 - c)
        rank_one = torch.outer(self.path_c, self.path_c)
        rank_mu = (self._weights[:, None] * steps).T @ steps
        self.covariance = kept * self.covariance + self._c_1 * rank_one + self._c_mu * rank_mu
        self.sigma = self.sigma * math.exp(self._c_sigma / self._damping * (length / self._expected_norm - 1))
        self.counts = torch.tensor([generation, int(self.counts[1])])
        if generation - int(self.counts[1]) >= self._renew_every:
            self._renew_axes(generation)

    def _renew_axes(self, generation: int) -> None:
        self.covariance = (self.covariance + self.covariance.T) / 2
        values, self.axes = torch.linalg.eigh(self.covariance)
        self.scales = values.clamp(min=1e-20).sqrt()
        self.counts[1] = generation

    def state(self) -> dict[str, Tensor]:
        """Everything the next generation depends on besides the random numbers."""
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for name in _STATE:
            setattr(self, name, state[name].clone())
