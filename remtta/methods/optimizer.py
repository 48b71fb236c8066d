"""SGD or Adam over named tensors, with a state by name and a scalable learning rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from remtta.methods.settings.base import MethodConfig

_PREFIX = "optimizer."

_log = logging.getLogger(__name__)


class NamedOptimizer:
    """The optimizer of a config over named tensors, which get gradients; groups without a rate use the config's."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: MethodConfig, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._groups = groups
        self._lr_factor = 1.0
        for tensor in tensors.values():
            tensor.requires_grad_(True)

    @cached_property
    def _torch(self) -> torch.optim.Optimizer:
        """torch's optimizer; made when it is needed, as that imports torch._dynamo, which takes seconds."""
        config = self._config
        groups = [{**group, "lr": group.get("lr", config.lr) * self._lr_factor} for group in self._groups]
        if config.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov)
        return torch.optim.Adam(groups, betas=(config.momentum, 0.999))

    def restart(self) -> None:
        """Forget all steps; the learning rate stays scaled."""
        vars(self).pop("_torch", None)

    def scale_lr(self, factor: float) -> None:
        """Multiply the config's learning rates by a factor, also after `restart`."""
        for group in self._torch.param_groups if "_torch" in vars(self) else ():
            group["lr"] *= factor / self._lr_factor
        self._lr_factor = factor

    def gradients(self) -> list[Tensor]:
        return [tensor.grad for tensor in self._tensors.values() if tensor.grad is not None]

    def has_finite_gradients(self) -> bool:
        return bool(torch.isfinite(nn.utils.get_total_norm(self.gradients())))

    def zero_grad(self) -> None:
        for tensor in self._tensors.values():
            tensor.grad = None

    def step(self) -> None:
        self._torch.step()

    @torch.enable_grad()
    def take_steps(self, backward: Callable[[], None], num_steps: int) -> bool:
        """Take steps for one image, with gradients computed by `backward`; return whether there was any."""
        for number in range(num_steps):
            self.zero_grad()
            backward()
            if not self.has_finite_gradients():
                _log.warning("skipped an image: its gradients are not finite")
                return number > 0
            self.step()
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return torch's optimizer state on the CPU; empty before the first step."""
        return {
            f"{_PREFIX}{name}:{key}": torch.as_tensor(value).detach().cpu().clone()
            for name, tensor in self._tensors.items()
            for key, value in self._torch.state.get(tensor, {}).items()
            if value is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned into a restarted optimizer, ignoring other entries."""
        for entry, value in state.items():
            if entry.startswith(_PREFIX):
                name, _, key = entry.removeprefix(_PREFIX).rpartition(":")
                if (key == "momentum_buffer") != (self._config.optimizer == "sgd"):
                    raise ValueError(f"it was trained by another optimizer than {self._config.optimizer}")
                tensor = self._tensors[name]
                device = "cpu" if key == "step" else tensor.device
                self._torch.state[tensor][key] = value.to(device, copy=True)
