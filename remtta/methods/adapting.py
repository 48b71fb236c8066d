"""What surrounds every update of a model: predictions before it, answers ahead of it, resets, states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from remtta.backbones.base import check_images
from remtta.backbones.batchnorm import BatchStatistics, running_statistics
from remtta.backbones.families import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError, UsageError
from remtta.methods.base import DELTA, MethodBase
from remtta.methods.settings import MethodConfig

_UPDATES = "updates"
_GENERATOR = "generator"
_OWN = "own."


class AdaptingMethod(MethodBase, ABC):
    """Predict a batch, then adapt to it, at once or when there is time; a method says how, in `_adapt`.

    The model is adapted in place: everything but the chosen weights (the norms,
    unless a method overrides `_chosen`) is frozen, and it is put in eval mode.
    Batch norms have statistics as the config says; only `predict_source` has
    the source's. Those of `predict` are of the images that it is given.

    Whatever else than the weights the next update depends on, a method keeps in
    `_own_state`, `_load_own_state` and `_forget`; it draws its random numbers
    from `_generator`, whose state is kept here.

    Args:
        model: A classifier that `backbone_of` knows, float32.
        config: Settings of the update.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
    """

    adapts = True
    accumulates = True  # what a batch taught is still there at the next

    def __init__(self, model: nn.Module, config: MethodConfig) -> None:
        self._config = config
        self.micro_batch = config.micro_batch
        self._backbone = backbone_of(model)
        if self._backbone.num_classes < 2:
            raise ModelError("the model has no classifier head with at least two classes")
        module = self._backbone.module
        norms = self._backbone.batch_norms
        moving = running_statistics(norms) if config.bn_momentum else {}
        super().__init__(model, module, self._chosen(), config.precision, moving)
        self._source_context = self._context
        self._batch_norms = BatchStatistics(norms, config.bn, config.bn_prior)
        self._context = self._batch_norms.around(self._context)
        self._generator = torch.Generator().manual_seed(torch.initial_seed())
        self._answered: Tensor | None = None  # images that `learn` is to adapt to

    @abstractmethod
    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """Adapt to images (B, 3, H, W); returns the views (L, B, C) behind their prediction, the plain one first."""

    def _chosen(self) -> dict[str, nn.Parameter]:
        """The parameters that adapt, by their names in the timm model."""
        return adapted_norms(self._backbone, self._config.adapt_layers)

    def _output(self, logits: Tensor) -> Tensor:
        """The prediction (B, C) from a whole batch's plain logits (B, C)."""
        return logits

    def _own_state(self) -> dict[str, Tensor]:
        """What the next update depends on besides weights and generator."""
        return {}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `_own_state` returned."""

    def _forget(self) -> None:
        """Put what `_own_state` holds back to its beginning."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._backbone.device

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict a batch with the weights as they are, or as they are before its last step, then adapt to it.

        Args:
            images: Shape (B, 3, H, W), preprocessed, B >= 1.
            labels: Shape (B,), only for methods that need them.

        Returns:
            Logits of shape (B, C) from before that update, without gradient.

        Raises:
            ValueError: If images is not a batch of at least one image, or labels are missing.
        """
        self._check_labels(labels)
        self._prepare(images)
        self._last_views = self._adapt(images, labels)
        return self._output(self._last_views[0])

    def answer(self, images: Tensor) -> Tensor:
        """Predict a batch and nothing more, so that nobody waits for an update; `learn` then adapts to it.

        An answer from a batch's last step is there after all but one, and comes from a whole call.

        Args:
            images: As in a call, which does the same in one go.

        Returns:
            Logits of shape (B, C), without gradient.

        Raises:
            ValueError: If images is not a batch of at least one image.
        """
        if self._config.answer == "last" and self._config.steps > 1:
            self._answered = None
            return self(images)
        self._prepare(images)
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
        with self._weights.at_source(), self._source_context(images.device):
            return self._backbone.logits(images).float()

    @torch.inference_mode(False)  # the caller may be inside one
    def reset(self) -> None:
        """Go back to the source weights, exactly, and forget everything learned."""
        self._weights.reset()
        self._forget()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with nothing else learned; `reset` still means the source.

        Raises:
            DeltaError: If the delta does not fit the model.
        """
        self._weights.load(delta, num_updates)
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
        """Everything the next update depends on, on the CPU: delta, random numbers, the method's own."""
        state = {DELTA + name: tensor for name, tensor in self.delta().items()}
        state[_UPDATES] = torch.tensor(self.num_updates)
        state[_GENERATOR] = self._generator.get_state()
        own = {_OWN + name: tensor.detach().cpu().clone() for name, tensor in self._own_state().items()}
        return {**state, **own}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned.

        Raises:
            DeltaError: If it does not fit the model.
        """
        delta = {name.removeprefix(DELTA): tensor for name, tensor in state.items() if name.startswith(DELTA)}
        self.load_delta(delta, int(state[_UPDATES]))
        self._generator.set_state(state[_GENERATOR])
        self._load_own_state({name.removeprefix(_OWN): t for name, t in state.items() if name.startswith(_OWN)})

    def _prepare(self, images: Tensor) -> None:
        check_images(images, self._backbone.input_size)
        if self._config.episodic:
            self.reset()
        self._batch_norms.warn_of_few(len(images))

    def _check_labels(self, labels: Tensor | None) -> None:
        if self.needs_labels and labels is None:
            raise ValueError("this method learns from labels, and none were given")

    def _logits(self, images: Tensor) -> Tensor:
        with self._context(images.device):
            logits = self._backbone.logits(images)
        return logits.float()
