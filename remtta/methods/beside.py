"""What the methods share that train small networks beside a frozen model, after a warm-up on source images."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remtta.backbones.batchnorm import BatchStatistics, batch_norms
from remtta.errors import UsageError
from remtta.methods.gradient import GradientMethod
from remtta.methods.settings.beside import BesideConfig

Change = Callable[[int, Tensor, Tensor], Tensor]
"""Makes of a part's number, what enters the part and what leaves it, what the next part gets."""

_SEED = 0  # networks start alike, and warm up alike


class BesideMethod(GradientMethod):
    """Predict with a frozen model and networks beside its parts; the networks learn.

    They are warmed up on source images first. Streams have no labels, so the
    source model's own answers to these images stand in for the true ones. A
    reset goes back to the warmed-up networks; a state leaves them out: give
    them again by `use_source` before going on.

    Args:
        model: The classifier, frozen.
        config: Settings.

    Raises:
        UsageError: If its blocks are compiled, which would leave the networks out.
    """

    needs_source = True
    _networks: nn.Module
    _settings: BesideConfig

    def __init__(self, model: nn.Module, config: BesideConfig) -> None:
        self._settings = config
        super().__init__(model, config)
        self.most_source_images = config.warmup_images
        self._warm = False
        norms = {**self._backbone.batch_norms, **batch_norms(self._networks)}
        self._batch_norms = BatchStatistics(norms, config.bn, config.bn_prior)
        self._context = self._batch_norms.around(self._source_context)

    @abstractmethod
    def _build(self) -> nn.Module:
        """The networks as they are before the warm-up; random numbers are always the same here."""

    @abstractmethod
    def _parts(self) -> Sequence[Sequence[nn.Module]]:
        """Blocks that follow one another in the forward pass, part by part."""

    @abstractmethod
    def _change(self, images: Tensor) -> Change:
        """What the networks do to the parts of these images (B, 3, H, W)."""

    @abstractmethod
    def _warm_up_loss(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """What the warm-up lowers, of source images (B, 3, H, W) and the source model's classes of them (B,)."""

    def _learned(self) -> Mapping[str, Tensor]:
        """Which of the networks' tensors learn after the warm-up, too."""
        return dict(self._networks.named_parameters())

    def _chosen(self) -> dict[str, nn.Parameter]:
        return {}

    def _trainable(self) -> Mapping[str, Tensor]:
        if any(block._compiled_call_impl is not None for block in self._backbone.blocks):
            raise UsageError(f"{type(self).__name__} reaches in between blocks, which cannot be compiled then")
        shapes_only = self.device.type == "meta"
        with torch.random.fork_rng(devices=[]), torch.device("meta" if shapes_only else "cpu"):
            torch.manual_seed(_SEED)
            self._networks = self._build().to(self.device).eval()
        return self._learned()

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """As the base says.

        Raises:
            UsageError: If its networks are not warmed up.
        """
        if not self._warm:
            name = type(self).__name__
            raise UsageError(f"{name} warms up on clean source images first; name some by --source-data FOLDER")
        return super().__call__(images, labels)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """The networks after a warm-up with a step of Adam per batch of clean images, by their tensors' names.

        Raises:
            ValueError: If there is no image.
        """
        generator = torch.Generator().manual_seed(_SEED)
        parameters = list(self._networks.requires_grad_().train().parameters())
        optimizer = torch.optim.Adam(parameters, lr=self._settings.warmup_lr)
        started = False
        for images in batches:
            if not started:
                self._begin_warm_up(images)
                started = True
            loss = self._warm_up_loss(images, self.predict_source(images).argmax(-1), generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not started:
            raise ValueError("there are no source images to learn from")
        optimizer.zero_grad()
        self._networks.eval()
        return {name: tensor.detach().cpu().clone() for name, tensor in self._networks.state_dict().items()}

    def _begin_warm_up(self, images: Tensor) -> None:
        """What the networks take from the first batch, before any step."""

    @torch.no_grad()
    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Begin with what `source_statistics` returned, on this or an equal model.

        Raises:
            ValueError: If it is of other networks.
        """
        state = self._networks.state_dict()
        if {name: t.shape for name, t in statistics.items()} != {name: t.shape for name, t in state.items()}:
            raise ValueError("the source statistics are of other networks than these")
        self._start = {name: tensor.clone() for name, tensor in statistics.items()}
        self._warm = True
        self._forget()

    def _own_state(self) -> dict[str, Tensor]:
        return dict(self._trained)

    @torch.no_grad()
    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._trained.items():
            tensor.copy_(state[name])

    def _forget(self) -> None:
        if self._warm:
            self._networks.load_state_dict(self._start)

    def _logits(self, images: Tensor) -> Tensor:
        with self._context(images.device):
            return self._run(images, self._change(images))

    def _run(self, images: Tensor, change: Change) -> Tensor:
        """Logits (B, C) with what leaves each part changed."""
        with _changed(self._parts(), change):
            logits: Tensor = self._backbone.module(images)
        return logits.float()


@contextlib.contextmanager
def _changed(parts: Sequence[Sequence[nn.Module]], change: Change) -> Iterator[None]:
    """Hooks on the first and last block of each part, for one forward pass."""
    entering: dict[int, Tensor] = {}
    hooks: list[Any] = []
    for number, part in enumerate(parts):

        def enter(block: nn.Module, inputs: Any, number: int = number) -> None:
            entering[number] = inputs[0]

        def leave(block: nn.Module, inputs: Any, output: Tensor, number: int = number) -> Tensor:
            return change(number, entering[number], output)

        hooks += [part[0].register_forward_pre_hook(enter), part[-1].register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
