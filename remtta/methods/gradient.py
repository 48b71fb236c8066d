"""What the methods share that train a ViT by gradient descent on a loss per batch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remtta.backbones.norms import adapted_norms
from remtta.backbones.vit import classify, embed, unwrap
from remtta.errors import ModelError, UsageError
from remtta.methods.settings import MethodConfig
from remtta.models.precision import ForwardContext
from remtta.models.weights import AdaptedWeights, Committed

_log = logging.getLogger("remtta")

_OPTIMIZER_STATE = "optimizer."
_DELTA = "delta."
_UPDATES = "updates"
_GENERATOR = "generator"
_OWN = "own."


class GradientMethod(ABC):
    """Predict a batch, then take a step on the chosen weights; a method says by which loss.

    The model is adapted in place: everything but the chosen weights (the norms,
    unless a method overrides `_chosen`) is frozen, and it is put in eval mode. A
    batch whose gradients are not finite numbers is predicted and not adapted to.

    Whatever else than weights and optimizer the next update depends on, a method
    keeps in `_own_state`, `_load_own_state` and `_forget`; it draws its random
    numbers from `_generator`, whose state is kept here.

    Args:
        model: A timm VisionTransformer with a class token, float32, possibly
            inside DataParallel or torch.compile.
        config: Settings of the update.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
    """

    adapts = True
    needs_labels = False
    needs_source = False
    most_source_images: int | None = None
    norms_only = True
    accumulates = True  # what a batch taught is still there at the next
    num_models = 1
    delta_refusal: str | None = None

    def __init__(self, model: nn.Module, config: MethodConfig) -> None:
        self.model = model
        self._config = config
        self.micro_batch = config.micro_batch
        self._vit = unwrap(model)
        if not self._vit.num_classes or self._vit.num_classes < 2:
            raise ModelError("the model has no classifier head with at least two classes")
        model.eval().requires_grad_(False)
        self._context = ForwardContext(self._vit, config.precision)
        named = self._chosen()
        frozen = {name: p for name, p in self._vit.named_parameters() if name not in named}
        self._weights = AdaptedWeights(named, frozen)
        self._lr_factor = 1.0
        self._generator = torch.Generator().manual_seed(torch.initial_seed())
        self._trained = self._trainable()
        for tensor in self._trained.values():
            tensor.requires_grad_(True)
        self._optimizer = self._new_optimizer()
        self._last_views: Tensor | None = None
        self._answered: Tensor | None = None  # images that `learn` is to adapt to
        self._answered_targets: Tensor | None = None  # their targets, where the answer needed them

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

    def _chosen(self) -> dict[str, nn.Parameter]:
        """The parameters that adapt, by their names in the timm model."""
        return adapted_norms(self._vit, self._config.adapt_layers)

    def _trainable(self) -> Mapping[str, Tensor]:
        """What the optimizer steps, by name: the adapted parameters, unless others learn in their place."""
        return self._weights.parameters

    def _targets(self, images: Tensor, labels: Tensor | None) -> Tensor | None:
        """What the loss compares each image with, a row per image; made from the whole batch, before its parts."""
        return labels

    def _before_step(self) -> None:  # noqa: B027 - a hook
        """What the method takes from the gradients, before the optimizer, which may write to them, has its step."""

    def _after_step(self) -> None:  # noqa: B027 - a hook
        """What happens to the weights after the optimizer's step, before they count as committed."""

    def _after_batch(self, views: Tensor) -> None:  # noqa: B027 - a hook
        """What the method keeps of a batch's views (L, B, C), after its step; it may reset itself here."""

    def _output(self, logits: Tensor) -> Tensor:
        """The prediction (B, C) from a whole batch's plain logits (B, C)."""
        return logits

    def _own_state(self) -> dict[str, Tensor]:
        """What the next update depends on besides weights, optimizer and generator."""
        return {}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - a hook
        """Take back what `_own_state` returned."""

    def _forget(self) -> None:  # noqa: B027 - a hook
        """Put what `_own_state` holds back to its beginning."""

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

    @property
    def num_updates(self) -> int:
        """Optimizer steps that the current weights have seen."""
        return self.committed[1]

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""
        return self._weights.committed

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the adapted parameters, as in the timm model's `named_parameters()`."""
        return tuple(self._weights.parameters)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self._vit.cls_token.device  # some methods adapt no weight
        return device

    def part_size(self, batch_size: int) -> int:
        """How many images of a batch go forward and backward at a time."""
        return min(self.micro_batch or batch_size, batch_size)

    @property
    def last_views(self) -> Tensor | None:
        """Logits (L, B, C) behind the last batch's prediction: the plain view, then the method's others."""
        return self._last_views

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict a batch with the weights as they are, then adapt to it.

        Args:
            images: Shape (B, 3, H, W), preprocessed, B >= 1.
            labels: Shape (B,), only for methods that need them.

        Returns:
            Logits of shape (B, C) from before the update, without gradient.

        Raises:
            ValueError: If images is not a batch of at least one image, or labels are missing.
        """
        self._check_images(images)
        self._check_labels(labels)
        if self._config.episodic:
            self.reset()
        self._last_views = self._adapt(images, labels)
        return self._output(self._last_views[0])

    def answer(self, images: Tensor) -> Tensor:
        """Predict a batch and nothing more, so that nobody waits for an update; `learn` then adapts to it.

        Args:
            images: As in a call, which does the same in one go.

        Returns:
            Logits of shape (B, C), without gradient.

        Raises:
            ValueError: If images is not a batch of at least one image.
        """
        self._check_images(images)
        if self._config.episodic:
            self.reset()
        logits = self._answer(images)
        self._answered = images
        return logits

    def learn(self, labels: Tensor | None = None) -> None:
        """Adapt to the images of the last `answer`, if it was not done yet; with labels (B,) if a call needs them."""
        images, self._answered = self._answered, None
        if images is not None:
            self._check_labels(labels)
            self._last_views = self._adapt(images, labels)

    def _answer(self, images: Tensor) -> Tensor:
        """The prediction (B, C) that a call would give; what it knows already need not be computed again."""
        return self.predict(images)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Logits (B, C) of preprocessed images (B, 3, H, W), without adapting."""
        return self._output(self.predict_alone(images))

    @torch.no_grad()
    def predict_alone(self, images: Tensor) -> Tensor:
        """`predict` for images each by itself: without what a prediction owes to the rest of its batch."""
        return self._logits(images)

    @torch.no_grad()
    def predict_source(self, images: Tensor) -> Tensor:
        """Logits (B, C) of the source weights, without adapting."""
        with self._weights.at_source():
            return self._logits(images)

    def drift(self) -> float:
        """Norm of the change since the source over the norm of the source weights."""
        return self._weights.drift()

    def scale_lr(self, factor: float) -> None:
        """Multiply the config's learning rates, for this and every later optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] *= factor / self._lr_factor
        self._lr_factor = factor

    @torch.inference_mode(False)  # the caller may be inside one
    def reset(self) -> None:
        """Go back to the source weights, exactly, and forget everything learned."""
        self._optimizer.zero_grad(set_to_none=True)  # the model outlives the method, and gradients are as large
        self._weights.reset()
        self._optimizer = self._new_optimizer()
        self._forget()

    def delta(self) -> dict[str, Tensor]:
        """Adapted minus source weights, by parameter name; adding them restores the bits."""
        return self._weights.delta()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with a fresh optimizer; `reset` still means the source.

        Raises:
            DeltaError: If the delta does not fit the model.
        """
        self._weights.load(delta, num_updates)
        self._optimizer = self._new_optimizer()
        self._forget()

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """What the method learns from clean images of the source domain, for those with `needs_source`.

        Args:
            batches: Preprocessed images (B, 3, H, W), without labels.

        Returns:
            Tensors on the CPU, for `use_source`.
        """
        raise UsageError(f"{type(self).__name__} learns nothing from source images")

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with what `source_statistics` returned, on this or an equal model."""
        raise UsageError(f"{type(self).__name__} learns nothing from source images")

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on, on the CPU: delta, optimizer, random numbers, the method's own."""
        state = {_DELTA + name: tensor for name, tensor in self.delta().items()}
        state[_UPDATES] = torch.tensor(self.num_updates)
        state[_GENERATOR] = self._generator.get_state()
        state.update({_OWN + name: tensor.detach().cpu().clone() for name, tensor in self._own_state().items()})
        for name, parameter in self._trained.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"{_OPTIMIZER_STATE}{name}:{key}"] = torch.as_tensor(value).detach().cpu().clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned.

        Raises:
            DeltaError: If it does not fit the model.
        """
        delta = {name.removeprefix(_DELTA): tensor for name, tensor in state.items() if name.startswith(_DELTA)}
        self.load_delta(delta, int(state[_UPDATES]))
        for name, tensor in state.items():
            if name.startswith(_OPTIMIZER_STATE):
                parameter_name, _, key = name.removeprefix(_OPTIMIZER_STATE).rpartition(":")
                parameter = self._trained[parameter_name]
                place = "cpu" if key == "step" else parameter.device
                self._optimizer.state[parameter][key] = tensor.to(place, copy=True)
        self._generator.set_state(state[_GENERATOR])
        self._load_own_state({name.removeprefix(_OWN): t for name, t in state.items() if name.startswith(_OWN)})

    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """All steps on a batch; returns the views behind its prediction."""
        views = self._step(images, labels)
        for _ in range(self._config.steps - 1):
            self._step(images, labels)
        return views

    @torch.inference_mode(False)  # the caller may predict under no_grad or inference_mode
    @torch.enable_grad()
    def _step(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """One update; returns the views it was made from."""
        views = self._gradients(images, labels)
        self._apply_gradients()
        self._after_batch(views)
        return views

    def _gradients(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """Leave the batch's gradients in the parameters, none where no image counts; returns the views."""
        self._optimizer.zero_grad(set_to_none=True)
        images = images.clone() if images.is_inference() else images  # which no graph may hold
        targets, self._answered_targets = self._answered_targets, None
        if targets is None:
            targets = self._targets(images, labels)
        size = self.part_size(len(images))
        whole = size >= len(images)
        views, num_counted = [], 0
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            logits, loss, count = self._loss(images[part], None if targets is None else targets[part])
            if count and loss.requires_grad:  # else none of these images teaches anything
                # The loss is a mean over images, so the parts' sums add up to the batch's.
                (loss if whole else loss * count).backward()
            num_counted += count
            views.append(logits.detach())
        gradients = self._current_gradients()
        if gradients and not whole:
            torch._foreach_div_(gradients, float(num_counted))
        return torch.cat(views, dim=1)

    def _current_gradients(self) -> list[Tensor]:
        return [tensor.grad for tensor in self._trained.values() if tensor.grad is not None]

    def _apply_gradients(self) -> None:
        gradients = self._current_gradients()
        if not gradients:
            return
        if torch.isfinite(nn.utils.get_total_norm(gradients)):
            self._before_step()
            self._optimizer.step()
            self._after_step()
            self._weights.commit()
        else:
            _log.warning("a batch gave gradients that are not finite numbers, and was not adapted to")

    def _check_images(self, images: Tensor) -> None:
        embed = self._vit.patch_embed
        size = tuple(embed.img_size) if embed.img_size and embed.strict_img_size else ("H", "W")
        wanted = f"float32 of shape (B, 3, {size[0]}, {size[1]}) with B >= 1"
        if not isinstance(images, Tensor):
            raise ValueError(f"images must be a tensor, {wanted}, got {type(images).__name__}")
        fits = images.ndim == 4 and len(images) > 0 and images.shape[1] == 3
        fits = fits and (size == ("H", "W") or tuple(images.shape[2:]) == size)
        if not fits or images.dtype != torch.float32:
            raise ValueError(f"images must be {wanted}, got {images.dtype} of shape {tuple(images.shape)}")

    def _check_labels(self, labels: Tensor | None) -> None:
        if self.needs_labels and labels is None:
            raise ValueError("this method learns from labels, and none were given")

    def _logits(self, images: Tensor) -> Tensor:
        with self._context(images.device):
            logits = classify(self._vit, embed(self._vit, images))
        return logits.float()

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer steps, in groups that may have their own learning rates."""
        return [{"params": list(self._trained.values())}]

    def _new_optimizer(self) -> torch.optim.Optimizer:
        config, groups = self._config, self._parameter_groups()
        for group in groups:
            group["lr"] = group.get("lr", config.lr) * self._lr_factor
        if config.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov)
        return torch.optim.Adam(groups, betas=(config.momentum, 0.999))
