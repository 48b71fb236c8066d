"""Base of methods that train small networks beside a frozen model, after a warm-up on source images."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from remtta.backbones.batchnorm import batch_norms
from remtta.baselines.source_statistics import SourceStatistics
from remtta.errors import UsageError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.settings.base import Count, NoNormsConfig, Positive

Change = Callable[[int, Any, Tensor], Tensor]
"""Maps a part's index, its input and its output to the next part's input."""

_SEED = 0  # networks are initialised and warmed up reproducibly


@dataclass(frozen=True)
class SideNetworksConfig(NoNormsConfig):
    """Shared settings of methods with side networks. No weight of the model changes.

    Attributes:
        entropy_margin: Learn only from images with lower entropy; a fraction of ln C.
        warmup_images: Maximum number of clean source images for the warm-up.
        warmup_lr: Learning rate of the warm-up, which uses Adam.
    """

    entropy_margin: Positive = 0.4
    warmup_images: Count = 10_000
    warmup_lr: Positive = 1e-3


WARM_UP = ("warmup_images", "warmup_lr", "bn", "bn_prior", "precision")
"""Settings that affect the warm-up."""

Config = TypeVar("Config", bound=SideNetworksConfig)


class SideNetworks(SourceStatistics[Config]):
    """Predict with a frozen model and networks beside its parts; only the networks learn.

    They are first warmed up on source images, with the source model's predictions in place of labels, which streams do
    not have. A reset restores the warmed-up networks. A state does not contain them: pass them to `use_source` before
    resuming. Raise UsageError if the model's blocks are compiled, which would bypass the networks.
    """

    trains = "none"

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        super().__init__(model, config)
        if any(block._compiled_call_impl is not None for block in model.backbone.blocks):
            raise UsageError(f"{type(self).__name__} runs code between blocks, which cannot be compiled then")
        self.max_source_images = config.warmup_images
        self.margin = config.entropy_margin * self.log_classes
        shapes_only = model.device.type == "meta"
        with torch.random.fork_rng(devices=[]), torch.device("meta" if shapes_only else "cpu"):
            torch.default_generator.manual_seed(_SEED)
            self.networks = self.build().to(model.device, torch.float32).eval()
        self.trained = self.learned()
        side_norms = {f"beside.{name}": norm for name, norm in batch_norms(self.networks).items()}
        model.use_batch_norms({**model.backbone.batch_norms, **side_norms})

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the initial networks; the random seed is fixed here."""

    @abstractmethod
    def parts(self) -> Sequence[Sequence[nn.Module]]:
        """Return the parts of the model: consecutive blocks of the forward pass."""

    @abstractmethod
    def change(self, images: Tensor) -> Change:
        """Return the change that the networks apply to the parts of these images (B, 3, H, W)."""

    @abstractmethod
    def warm_up_loss(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return the loss of the warm-up on source images (B, 3, H, W) with the source model's classes (B,)."""

    def begin_warm_up(self, images: Tensor) -> None:
        """Initialise from the first batch, before any step."""

    def learned(self) -> Mapping[str, Tensor]:
        """Return the tensors of the networks that keep learning after the warm-up."""
        return dict(self.networks.named_parameters())

    @torch.enable_grad()
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Warm up the networks with one Adam step per batch of clean images; return their tensors by name."""
        generator = torch.Generator().manual_seed(_SEED)
        parameters = list(self.networks.requires_grad_().train().parameters())
        optimizer = torch.optim.Adam(parameters, lr=self.config.warmup_lr)
        for number, images in enumerate(batches):
            if number == 0:
                self.begin_warm_up(images)
            elif len(images) == 1:  # a rest, of which batch norms may take no statistics
                continue
            with torch.no_grad():
                labels = self.model.source_logits(images).argmax(-1)
            loss = self.warm_up_loss(images, labels, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        self.networks.eval()
        return {name: tensor.detach().cpu().clone() for name, tensor in self.networks.state_dict().items()}

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Start from these networks of `source_statistics`; raise ValueError if they are others than the method's."""
        state = self.networks.state_dict()
        if {name: t.shape for name, t in statistics.items()} != {name: t.shape for name, t in state.items()}:
            raise ValueError("the source statistics are of other networks than these")
        super().use_source(statistics)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        if self.statistics:
            self.networks.load_state_dict(self.statistics)
        self.buffers = dict(self.trained)

    def forward(self, images: Tensor) -> Tensor:
        with self.model.context(images.device):
            return self.run(images, self.change(images))

    def run(self, images: Tensor, change: Change) -> Tensor:
        """Return logits (B, C) with the output of each part changed, by hooks on its first and last block."""
        entering: dict[int, Any] = {}

        def enter(number: int, block: nn.Module, inputs: Any) -> None:
            entering[number] = inputs[0] if inputs else None

        def leave(number: int, block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return change(number, entering.get(number), output)

        with contextlib.ExitStack() as hooks:
            for number, part in enumerate(self.parts()):
                hooks.enter_context(part[0].register_forward_pre_hook(partial(enter, number)))
                hooks.enter_context(part[-1].register_forward_hook(partial(leave, number)))
            logits = self.model.backbone.forward(images)
        return logits.float()
