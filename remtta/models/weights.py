"""The adapted weights, and the source weights they started from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from remtta.errors import DeltaError, ModelError

Committed = tuple[Mapping[str, Tensor], int]
"""Delta and number of updates of a commit; later commits do not modify these tensors."""


class AdaptedWeights:
    """Named parameters, their source values, and the exact difference of the two.

    After every `commit` each parameter equals `source + delta` bit for bit, so the delta alone is enough to restore the
    weights. Committing replaces the delta in one assignment: after an interrupted step the delta is that of the last
    complete update, never of half an update. Raise ModelError if one of them is not float32, or was made under
    `torch.inference_mode`.

    Args:
        named: Parameters by name; updated in place.
        frozen: All other parameters of the model, and its running statistics; a delta made with another choice of
            layers may change these too, but training never does.
        moving: Running statistics that change with the adapted parameters.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], frozen: Mapping[str, Tensor], moving: Mapping[str, Tensor]
    ) -> None:
        for name, parameter in {**named, **moving, **frozen}.items():
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"{name} is {parameter.dtype}; adapt a float32 model (model.float(); use precision for bf16)"
                )
            if parameter.is_inference():
                raise ModelError(f"{name} was made under torch.inference_mode; build the model outside of it")
        self.parameters = dict(named)
        self._tracked: dict[str, Tensor] = {**named, **moving}
        self._initial = frozenset(self._tracked)
        self._all = {**frozen, **self._tracked}
        self._source = self.copy()
        self.committed: Committed = (self._zeros(), 0)

    @property
    def source(self) -> dict[str, Tensor]:
        """The source values of the adapted parameters, which must not be modified."""
        return {name: self._source[name] for name in self.parameters}

    @torch.no_grad()
    def commit(self) -> None:
        """Commit the current values as one more update, rounded to `source + delta`."""
        changes = torch._foreach_sub([*self._tracked.values()], [*self._source.values()]) if self._tracked else ()
        delta = dict(zip(self._tracked, changes, strict=True))
        self._put_delta(delta)
        self.committed = (delta, self.committed[1] + 1)

    @torch.no_grad()
    def pull(self, share: float) -> None:
        """Move the adapted weights by this share towards the source's."""
        if self.parameters:
            torch._foreach_lerp_([*self.parameters.values()], [*self.source.values()], share)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the source weights, bit for bit."""
        self.put(self._source.items())
        self.committed = (self._zeros(), 0)

    def at_source(self) -> contextlib.AbstractContextManager[None]:
        """Use the source weights within the block."""
        return self._holding(self._source.items())

    def between(self, share: float) -> contextlib.AbstractContextManager[None]:
        """Use weights interpolated from the source's (share 0) to the adapted ones (share 1) within the block."""
        return self._holding((n, source.lerp(self._tracked[n].detach(), share)) for n, source in self._source.items())

    @contextlib.contextmanager
    def _holding(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        adapted = self.copy()
        try:
            self.put(values)
            yield
        finally:
            self.put(adapted.items())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use the committed weights within the block, in a model that has its source weights before and after it."""
        self._put_delta(self.committed[0])
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Put the source weights into the model, so that others can adapt it."""
        self.put(self._source.items())

    def copy(self) -> dict[str, Tensor]:
        """Return copies of the current weights, committed or not, for `put`."""
        return {name: tensor.detach().clone() for name, tensor in self._tracked.items()}

    @torch.no_grad()
    def put(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set current weights by name, without committing them."""
        if new := dict(values):  # all at once: on a GPU, each operation has a cost of its own
            torch._foreach_copy_([self._tracked[name] for name in new], [*new.values()])

    @torch.no_grad()
    def _put_delta(self, delta: Mapping[str, Tensor]) -> None:
        """Set current weights to `source + delta`."""
        self.put(self._source.items())
        if delta:
            torch._foreach_add_([*self._tracked.values()], [delta[name] for name in self._tracked])

    def drift(self) -> float:
        """Return the norm of the parameters' committed change relative to that of their source values."""
        if not self.parameters:
            return 0.0
        change, source = (
            torch.nn.utils.get_total_norm([tensors[name] for name in self.parameters])
            for tensors in (self.committed[0], self._source)
        )
        return float(change / source)

    @torch.no_grad()
    def load(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Set the weights to `source + delta`, the result of `num_updates` updates; raise DeltaError if a name is
        unknown or a shape is wrong; nothing is changed then.
        """
        check_delta(delta, self._all)
        self.reset()
        for name in self._tracked.keys() - self._initial - delta.keys():  # of an earlier delta
            del self._tracked[name], self._source[name]
        for name in delta.keys() - self._tracked.keys():
            self._tracked[name] = self._all[name]
            self._source[name] = self._all[name].detach().clone()
        whole_delta = self._zeros() | {name: tensor.to(self._source[name]) for name, tensor in delta.items()}
        self._put_delta(whole_delta)
        self.committed = (whole_delta, num_updates)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(source) for name, source in self._source.items()}


def within(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of a state whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def count_in(state: Mapping[str, Tensor], name: str) -> int:
    """Return a count of a state; raise ValueError if the entry is no whole number from 0."""
    tensor = state[name]
    if tensor.numel() != 1 or tensor.is_floating_point() or tensor < 0:
        raise ValueError(f"its {name} is {tensor.tolist()}, not a count")
    return int(tensor)


def check_delta(delta: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Raise DeltaError, naming the first tensor that is unknown, misshapen or not finite."""
    for name, tensor in delta.items():
        if name not in parameters:
            raise DeltaError(f"the delta changes {name}, which the model does not have")
        if tensor.shape != parameters[name].shape:
            raise DeltaError(
                f"the delta's {name} has shape {tuple(tensor.shape)}, the model's has {tuple(parameters[name].shape)}"
            )
        # In the model's dtype: a finite double may overflow a float.
        if not tensor.is_floating_point() or not torch.isfinite(tensor.to(parameters[name].dtype)).all():
            raise DeltaError(f"the delta's {name} holds values that are not finite numbers")
