"""Adaptation methods. Each one predicts a batch, then learns from it.

A new method is one file with a class that keeps the `Method` protocol (most
subclass `GradientMethod` and write a loss), a config in `remtta.config`, and a
line in METHODS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from remtta.config import METHOD_CONFIGS, MethodConfig
from remtta.errors import UsageError
from remtta.methods.cmf import CMF
from remtta.methods.come import EATACOME, REMCOME, SARCOME, TentCOME
from remtta.methods.continual_mae import ContinualMAE
from remtta.methods.cotta import CoTTA
from remtta.methods.deyo import DeYO
from remtta.methods.eata import EATA
from remtta.methods.eta import ETA
from remtta.methods.foa import FOA
from remtta.methods.lame import LAME
from remtta.methods.memo import MEMO
from remtta.methods.petal import PETAL
from remtta.methods.pseudo_label import PseudoLabel
from remtta.methods.rdumb import RDumb
from remtta.methods.rem import REM
from remtta.methods.roid import ROID
from remtta.methods.sar import SAR
from remtta.methods.source import Source
from remtta.methods.supervised import Supervised
from remtta.methods.tent import Tent
from remtta.methods.vdp import VDP
from remtta.methods.vida import ViDA
from remtta.weights import Committed


class Method(Protocol):
    """What `adapt_stream` and `evaluate` ask of a method."""

    @property
    def adapts(self) -> bool:
        """Whether a batch changes the weights."""

    @property
    def needs_labels(self) -> bool:
        """Whether it learns from true labels."""

    @property
    def needs_source(self) -> bool:
        """Whether it learns from clean images of the source domain first."""

    @property
    def most_source_images(self) -> int | None:
        """Of how many of them at most; None for all."""

    @property
    def norms_only(self) -> bool:
        """Whether only normalisation weights change, so that a delta is small."""

    @property
    def delta_refusal(self) -> str | None:
        """Why what it learns cannot be saved as a delta, if it cannot."""

    @property
    def num_models(self) -> int:
        """Copies of the model it holds."""

    @property
    def num_trained(self) -> int:
        """Numbers that it learns: weights, prompts, adapters."""

    @property
    def num_forwards(self) -> float:
        """Forward passes per image."""

    @property
    def num_backwards(self) -> float:
        """Backward passes per image."""

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the parameters that adapt."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps that the current weights have seen."""

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""

    @property
    def last_views(self) -> Tensor | None:
        """Logits (L, B, C) behind the last batch's prediction, the plain view first."""

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict logits (B, C) for preprocessed images (B, 3, H, W), then adapt."""

    def answer(self, images: Tensor) -> Tensor:
        """Predict logits (B, C) at once; `learn` then adapts to the same images."""

    def learn(self, labels: Tensor | None = None) -> None:
        """Adapt to the images of the last `answer`."""

    def predict(self, images: Tensor) -> Tensor:
        """Predict without adapting."""

    def reset(self) -> None:
        """Back to the source weights, exactly."""

    def delta(self) -> dict[str, Tensor]:
        """Adapted minus source, by parameter name."""

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta."""

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """What it learns from preprocessed source images (B, 3, H, W), if `needs_source`."""

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with what `source_statistics` returned."""

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on, beside what was learned from source images."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""


METHODS: dict[str, Callable[[nn.Module, Any], Method]] = {
    "source": Source,
    "pseudo-label": PseudoLabel,
    "tent": Tent,
    "tent-come": TentCOME,
    "eta": ETA,
    "eata": EATA,
    "eata-come": EATACOME,
    "rdumb": RDumb,
    "sar": SAR,
    "sar-come": SARCOME,
    "deyo": DeYO,
    "roid": ROID,
    "cmf": CMF,
    "rem": REM,
    "rem-n1": REM,
    "rem-come": REMCOME,
    "supervised": Supervised,
    "cotta": CoTTA,
    "lame": LAME,
    "memo": MEMO,
    "foa": FOA,
    "vida": ViDA,
    "continual-mae": ContinualMAE,
    "petal": PETAL,
    "vdp": VDP,
}
"""Every method by its name on the command line; its config is in METHOD_CONFIGS."""


def build_method(name: str, model: nn.Module, config: MethodConfig | None = None) -> Method:
    """Set up a method on a model.

    Args:
        name: One of METHODS.
        model: The model, adapted in place.
        config: The method's own kind of config; its defaults if None.

    Raises:
        UsageError: If there is no such method, or its settings do not suit the model.
        ModelError: If the method cannot adapt the model.
    """
    if name not in METHODS:
        raise UsageError(f'unknown method "{name}"; choose {", ".join(METHODS)}')
    try:
        return METHODS[name](model, config or METHOD_CONFIGS[name]())
    except ValueError as error:  # such as a mask ratio that leaves no patch of this model
        raise UsageError(str(error)) from error
