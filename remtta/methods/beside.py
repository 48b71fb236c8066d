"""What the methods share that train small networks beside a frozen model, after a warm-up on source images."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from remtta.backbones.batchnorm import batch_norms
from remtta.errors import UsageError
from remtta.methods.net import Net
from remtta.methods.objective import Objective
from remtta.methods.settings.base import NO_WEIGHTS, Count, MethodConfig, Positive

Change = Callable[[int, Tensor, Tensor], Tensor]
"""Makes of a part's number, what enters the part and what leaves it, what the next part gets."""

_SEED = 0  # networks start alike, and warm up alike


@dataclass(frozen=True)
class BesideConfig(MethodConfig):
    """What they share. No weight of the model changes.

    Attributes:
        entropy_margin: Images with less entropy are learned from, as a fraction of ln C.
        warmup_images: Clean source images to warm up on, at most.
        warmup_lr: Learning rate of the warm-up, which is Adam's here.
    """

    entropy_margin: Positive = 0.4
    warmup_images: Count = 10_000
    warmup_lr: Positive = 1e-3
    unused = NO_WEIGHTS
    no_layers = "as no weight changes"


WARM_UP = ("warmup_images", "warmup_lr", "bn", "bn_prior", "precision")
"""Settings that the warm-up depends on."""

Config = TypeVar("Config", bound=BesideConfig)


class Beside(Objective[Config]):
    """Predict with a frozen model and networks beside its parts; the networks learn.

    They are warmed up on source images first. Streams have no labels, so the
    source model's own answers to these images stand in for the true ones. A
    reset goes back to the warmed-up networks; a state leaves them out: give
    them again by `use_source` before going on.

    Raises:
        UsageError: If its blocks are compiled, which would leave the networks out.
    """

    chosen = "none"
    needs_source = True

    def __init__(self, net: Net, config: Config) -> None:
        super().__init__(net, config)
        if any(block._compiled_call_impl is not None for block in net.backbone.blocks):
            raise UsageError(f"{type(self).__name__} reaches in between blocks, which cannot be compiled then")
        self.most_source_images = config.warmup_images
        self.margin = config.entropy_margin * math.log(net.num_classes)
        shapes_only = net.device.type == "meta"
        with torch.random.fork_rng(devices=[]), torch.device("meta" if shapes_only else "cpu"):
            torch.manual_seed(_SEED)
            self.networks = self.build().to(net.device).eval()
        self.trained = self.learned()
        self._start: dict[str, Tensor] = {}
        net.normalise({**net.backbone.batch_norms, **batch_norms(self.networks)})

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the networks as they are before the warm-up; random numbers are always the same here."""

    @abstractmethod
    def parts(self) -> Sequence[Sequence[nn.Module]]:
        """Return blocks that follow one another in the forward pass, part by part."""

    @abstractmethod
    def change(self, images: Tensor) -> Change:
        """Return what the networks do to the parts of these images (B, 3, H, W)."""

    @abstractmethod
    def warm_up_loss(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return what the warm-up lowers, of source images (B, 3, H, W) and the source model's classes of them (B,)."""

    def begin_warm_up(self, images: Tensor) -> None:
        """Take something from the first batch, before any step."""

    def learned(self) -> Mapping[str, Tensor]:
        """Return those of the networks' tensors that learn after the warm-up, too."""
        return dict(self.networks.named_parameters())

    @torch.enable_grad()
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the networks after a warm-up with a step of Adam per batch of clean images, by their tensors' names.

        Raises:
            ValueError: If there is no image.
        """
        generator = torch.Generator().manual_seed(_SEED)
        parameters = list(self.networks.requires_grad_().train().parameters())
        optimizer = torch.optim.Adam(parameters, lr=self.config.warmup_lr)
        started = False
        for images in batches:
            if not started:
                self.begin_warm_up(images)
                started = True
            with torch.no_grad():
                labels = self.net.source_logits(images).argmax(-1)
            loss = self.warm_up_loss(images, labels, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not started:
            raise ValueError("there are no source images to learn from")
        optimizer.zero_grad()
        self.networks.eval()
        return {name: tensor.detach().cpu().clone() for name, tensor in self.networks.state_dict().items()}

    @torch.no_grad()
    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Begin with what `source_statistics` returned, on this or an equal model.

        Raises:
            ValueError: If it is of other networks.
        """
        state = self.networks.state_dict()
        if {name: t.shape for name, t in statistics.items()} != {name: t.shape for name, t in state.items()}:
            raise ValueError("the source statistics are of other networks than these")
        self._start = {name: tensor.clone() for name, tensor in statistics.items()}
        self.begin()

    def begin(self) -> None:
        if self._start:
            self.networks.load_state_dict(self._start)
        self.memory = dict(self.trained)

    def logits(self, images: Tensor) -> Tensor:
        with self.net.context(images.device):
            return self.run(images, self.change(images))

    def run(self, images: Tensor, change: Change) -> Tensor:
        """Return logits (B, C) with what leaves each part changed."""
        with _changed(self.parts(), change):
            logits = self.net.backbone.forward(images)
        return self.net.plain(logits)


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
