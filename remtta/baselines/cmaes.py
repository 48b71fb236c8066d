"""CMA-ES: minimise a function of many variables by sampling, without gradients.

Libraries do not fit: pycma, which FOA's code uses, saves its state only as a pickle and draws from NumPy's global
random numbers; `cmaes` has no interface to its state and decomposes the covariance matrix in every generation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_STATE = ("mean", "sigma", "covariance", "path_sigma", "path_c", "axes", "scales", "counts")


class CMAES:
    """The covariance matrix adaptation evolution strategy with the constants of pycma 4.5, on the CPU.

    It optimises `dim` variables, initially with mean 0 and standard deviation 1, by default in generations of 4 +
    floor(3 ln dim) candidates.

    Source: The CMA Evolution Strategy: A Tutorial, arXiv:1604.00772; without negative weights. The step size is adapted
    by its path (pycma's CMAAdaptSigmaCSA), with the tutorial's damping for any population size.
    """

    def __init__(self, dim: int, population: int | None = None) -> None:
        self.dim, self.population = dim, population or 4 + math.floor(3 * math.log(dim))
        raw = math.log((self.population + 1) / 2) - torch.arange(1, self.population // 2 + 1, dtype=torch.float64).log()
        self._weights = raw / raw.sum()  # of the best candidates, descending
        mass = self._mass = float(1 / self._weights.square().sum())  # effective number of candidates
        # Learning rates of the step size's path (as in pycma, which FOA uses; the tutorial has + 5), of the
        # covariance's path, and of the covariance by this path (rank one) and by the best candidates (rank mu).
        self._sigma_rate = (mass + 2) / (dim + mass + 3)
        self._path_rate = (4 + mass / dim) / (dim + 4 + 2 * mass / dim)
        self._rank_one_rate = 2 / ((dim + 1.3) ** 2 + mass)
        self._rank_mu_rate = min(1 - self._rank_one_rate, 2 * (mass - 1.75 + 1 / mass) / ((dim + 2) ** 2 + mass))
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (dim + 1)) - 1) + self._sigma_rate
        self._expected_norm = math.sqrt(dim) * (1 - 1 / (4 * dim) + 1 / (21 * dim**2))  # of a standard normal vector
        # Number of generations after which the covariance has changed enough to recompute its axes.
        self._renew_every = max(1, math.floor(1 / (10 * dim * (self._rank_one_rate + self._rank_mu_rate))))
        self.reset()

    def reset(self) -> None:
        """Restart from the first generation."""
        identity = torch.eye(self.dim, dtype=torch.float64)
        self.mean, self.sigma = torch.zeros(self.dim, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        self.covariance, self.axes = identity, identity.clone()
        self.scales = torch.ones(self.dim, dtype=torch.float64)
        self.path_sigma, self.path_c = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        self.counts = torch.zeros(2, dtype=torch.int64)  # generations so far, and the generation of the axes

    def ask(self, generator: torch.Generator) -> Tensor:
        """Sample candidates (population, dim), float64."""
        drawn = torch.randn(self.population, self.dim, dtype=torch.float64, generator=generator)
        return self.mean + self.sigma * (drawn * self.scales) @ self.axes.T

    def tell(self, candidates: Tensor, fitness: Tensor) -> None:
        """Update towards the candidates (population, dim) of lowest fitness (population,)."""
        best = fitness.double().argsort(stable=True)[: len(self._weights)]
        steps = (candidates[best] - self.mean) / self.sigma
        step = self._weights @ steps
        self.mean = self.mean + self.sigma * step
        generation = int(self.counts[0]) + 1
        whitened = self.axes @ ((self.axes.T @ step) / self.scales)
        rate = self._sigma_rate
        self.path_sigma = (1 - rate) * self.path_sigma + math.sqrt(rate * (2 - rate) * self._mass) * whitened
        length = float(self.path_sigma.norm())
        settled_length = (1.4 + 2 / (self.dim + 1)) * self._expected_norm
        settled = length / math.sqrt(1 - (1 - rate) ** (2 * generation)) < settled_length
        rate = self._path_rate
        self.path_c = (1 - rate) * self.path_c + settled * math.sqrt(rate * (2 - rate) * self._mass) * step
        decay = 1 - self._rank_one_rate - self._rank_mu_rate + (not settled) * self._rank_one_rate * rate * (2 - rate)
        rank_one = torch.outer(self.path_c, self.path_c)
        rank_mu = (self._weights[:, None] * steps).T @ steps
        self.covariance = decay * self.covariance + self._rank_one_rate * rank_one + self._rank_mu_rate * rank_mu
        self.sigma = self.sigma * math.exp(self._sigma_rate / self._damping * (length / self._expected_norm - 1))
        self.counts = torch.tensor([generation, int(self.counts[1])])
        if generation - int(self.counts[1]) >= self._renew_every:
            self._renew_axes(generation)

    def _renew_axes(self, generation: int) -> None:
        self.covariance = (self.covariance + self.covariance.T) / 2
        values, axes = torch.linalg.eigh(self.covariance)
        self.axes = axes.contiguous()  # as a saved state restores them, for the same rounding
        self.scales = values.clamp(min=1e-20).sqrt()
        self.counts[1] = generation

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next generation depends on, except the random numbers."""
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name in _STATE:
            setattr(self, name, state[name].clone())
