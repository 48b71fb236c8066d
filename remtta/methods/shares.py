"""Which images of a batch a process goes through, where several of them take a share each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Shares:
    """All images of each batch are this process's own."""

    num_ranks = 1

    def own(self, num_images: int) -> slice:
        """This process's images of a batch of so many: one at least, which counts for nothing where it has none."""
        return slice(num_images)

    def gathered(self, rows: Tensor, num_images: int, dim: int = 0) -> Tensor:
        """What all processes have of a batch, from the rows that this one has of its own images along `dim`."""
        return rows

    def add_up(self, tensors: Iterable[Tensor], count: int, num_images: int) -> int:
        """Have in the gradients of tensors their sums over all processes; returns the sum of the counts."""
        return count

    def map(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Rows (B, ...) that a function has for images (B, 3, H, W), each by itself."""
        return self.gathered(function(images[self.own(len(images))]), len(images))


class EvenShares(Shares, ABC):
    """Shares as even as can be, of several processes; how they hear of one another is left open.

    Args:
        rank: Which of them this is, from 0.
        num_ranks: How many there are.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    @abstractmethod
    def _of_all(self, rows: Tensor) -> list[Tensor]:
        """A tensor of each process, by rank, all of one shape."""

    @abstractmethod
    def _sum(self, numbers: Tensor) -> None:
        """Put into a tensor its sum over all processes."""

    def own(self, num_images: int) -> slice:
        """Those that come after the ones of lower ranks; the first image where there are fewer than processes."""
        sizes = self._sizes(num_images)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank]) if sizes[self.rank] else slice(1)

    def gathered(self, rows: Tensor, num_images: int, dim: int = 0) -> Tensor:
        """The rows of all, in the order of the batch."""
        sizes, rows = self._sizes(num_images), rows.movedim(dim, 0)
        padded = rows.new_zeros(sizes[0], *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = zip(self._of_all(padded), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts]).movedim(0, dim)

    def add_up(self, tensors: Iterable[Tensor], count: int, num_images: int) -> int:
        """All in one sum over the processes; no gradients where nobody has any."""
        tensors, has_own = list(tensors), bool(self._sizes(num_images)[self.rank])
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in tensors]
        taught = any(each.grad is not None for each in tensors)
        told = torch.tensor([count, taught], dtype=torch.float32, device=tensors[0].device)
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), told])
        if not has_own:
            flat.zero_()
        self._sum(flat)
        total, teaching = flat[-2:].tolist()
        parts = flat[:-2].split([each.numel() for each in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = part.view_as(tensor) if teaching else None
        return int(total)

    def _sizes(self, num_images: int) -> list[int]:
        least, more = divmod(num_images, self.num_ranks)
        return [least + (rank < more) for rank in range(self.num_ranks)]
