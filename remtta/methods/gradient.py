"""What the methods share that train a model by gradient descent on a loss per batch."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remtta.methods.adapting import AdaptingMethod
from remtta.methods.optimizer import NamedOptimizer
from remtta.methods.settings import MethodConfig

_log = logging.getLogger("remtta")


class GradientMethod(AdaptingMethod):
    """Predict a batch, then take a step on the chosen weights; a method says by which loss.

    A batch whose gradients are not finite numbers is predicted and not adapted to.
    """

    def __init__(self, model: nn.Module, config: MethodConfig) -> None:
        super().__init__(model, config)
        self._trained = self._trainable()
        self._optimizer = NamedOptimizer(self._trained, config, self._parameter_groups())
        self._answered_targets: Tensor | None = None  # of the answered images, where the answer needed them

    @abstractmethod
    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        """Views, loss, and the number of images the loss is a mean over.

        Args:
            images: Shape (B, 3, H, W), preprocessed.
            labels: Shape (B,), where the method needs them; or the rows that `_targets` made.

        Returns:
            Logits of the views (L, B, C), the plain one first; the scalar
            loss, a constant where no image teaches anything; and how many of
            the images it is a mean over, 0 for none.
        """

    def _trainable(self) -> Mapping[str, Tensor]:
        """What the optimizer steps, by name: the adapted parameters, unless others learn in their place."""
        return self._weights.parameters

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer steps, in groups that may have their own learning rates."""
        return [{"params": list(self._trained.values())}]

    def _targets(self, images: Tensor, labels: Tensor | None) -> Tensor | None:
        """What the loss compares each image with, a row per image; made from the whole batch, before its parts."""
        return labels

    def _before_step(self) -> None:
        """What the method takes from the gradients, before the optimizer, which may write to them, has its step."""

    def _after_step(self) -> None:
        """What happens to the weights after the optimizer's step, before they count as committed."""

    def _after_batch(self, views: Tensor) -> None:
        """What the method keeps of a batch's views (L, B, C), after its step; it may reset itself here."""

    @property
    def num_forwards(self) -> float:
        """Forward passes per image."""
        return self._config.steps

    @property
    def num_backwards(self) -> float:
        """Backward passes per image."""
        return self.num_forwards

    @property
    def num_trained(self) -> int:
        """Numbers that the optimizer steps: weights, or what learns in their place or beside them."""
        return sum(tensor.numel() for tensor in self._trained.values())

    def part_size(self, batch_size: int) -> int:
        """How many images of a batch go forward and backward at a time."""
        return min(self.micro_batch or batch_size, batch_size)

    def scale_lr(self, factor: float) -> None:
        """Multiply the config's learning rates, from now on."""
        self._optimizer.scale_lr(factor)

    @property
    def blends(self) -> bool:
        """Whether weights in between may answer for a mixture of both models: those of norms without statistics."""
        return self.norms_only and bool(self.adapted_names) and not self._batch_norms.mixes

    @torch.no_grad()
    def predict_between(self, images: Tensor, share: float) -> Tensor:
        """`predict` by weights this share of the way from the source's to the adapted ones."""
        with self._weights.between(share):
            return self.predict(images)

    @torch.inference_mode(False)  # the caller may be inside one
    def reset(self) -> None:
        """Go back to the source weights, exactly, and forget everything learned."""
        self._optimizer.zero_grad()  # the model outlives the method, and gradients are as large
        self._optimizer.restart()
        super().reset()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with a fresh optimizer; `reset` still means the source.

        Raises:
            DeltaError: If the delta does not fit the model.
        """
        super().load_delta(delta, num_updates)
        self._optimizer.restart()

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on, on the CPU: delta, random numbers, the method's own, optimizer."""
        return {**super().state(), **self._optimizer.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned.

        Raises:
            DeltaError: If it does not fit the model.
        """
        super().load_state(state)
        self._optimizer.load_state(state)

    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """All steps on a batch; returns the views behind its prediction."""
        views = [self._step(images, labels) for _ in range(self._config.steps)]
        return views[-1 if self._config.answer == "last" else 0]

    @torch.inference_mode(False)  # the caller may predict under no_grad or inference_mode
    @torch.enable_grad()
    def _step(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """One update; returns the views it was made from."""
        if self._config.bn_momentum:
            self._batch_norms.begin()
        views = self._gradients(images, labels)
        self._apply_gradients()
        self._after_batch(views)
        return views

    def _gradients(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """Leave the batch's gradients in the parameters, none where no image counts; returns the views."""
        self._optimizer.zero_grad()
        images = images.clone() if images.is_inference() else images  # which no graph may hold
        targets, self._answered_targets = self._answered_targets, None
        if targets is None:
            targets = self._targets(images, labels)
        size = self.part_size(len(images))
        whole = size >= len(images)
        if not whole:
            self._batch_norms.warn_of_parts()
        views, num_counted = [], 0
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            logits, loss, count = self._loss(images[part], None if targets is None else targets[part])
            if count and loss.requires_grad:  # else none of these images teaches anything
                # The loss is a mean over images, so the parts' sums add up to the batch's.
                (loss if whole else loss * count).backward()
            num_counted += count
            views.append(logits.detach())
        gradients = self._optimizer.gradients()
        if gradients and not whole:
            torch._foreach_div_(gradients, float(num_counted))
        return torch.cat(views, dim=1)

    def _apply_gradients(self) -> None:
        if not self._optimizer.gradients():
            return
        if self._optimizer.finite():
            self._before_step()
            self._optimizer.step()
            self._after_step()
            if self._config.anchor and self.norms_only:
                self._weights.pull(self._config.anchor)
            if self._config.bn_momentum:
                self._batch_norms.follow(self._config.bn_momentum)
            self._weights.commit()
        else:
            _log.warning("a batch gave gradients that are not finite numbers, and was not adapted to")
