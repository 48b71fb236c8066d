"""NORM: statistics of the batch in batch norms (Schneider et al., NeurIPS 2020, arXiv:2006.16971)."""

from __future__ import annotations

from dataclasses import dataclass

from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.settings.base import UPDATE_SETTINGS, MethodConfig
from remtta.methods.source import CenteredSource


@dataclass(frozen=True)
class NORMConfig(MethodConfig):
    """Settings of NORM: of the shared ones only those of batch norms, episodic and precision are used."""

    unused = (*UPDATE_SETTINGS, "micro_batch", "center")


class NORM(CenteredSource[NORMConfig]):
    """Predict with the batch's statistics in every batch norm; no weight changes.

    With `bn="recent"` the running statistics follow those of recent images, and are the content of a delta. Raise
    ModelError if the model has no batch norms.
    """

    settings = NORMConfig

    def __init__(self, model: AdaptedModel, config: NORMConfig) -> None:
        super().__init__(model, config)
        if not model.backbone.batch_norms:
            raise ModelError(
                "norm needs batch norms with running statistics, and the model has none that adapt; "
                "choose another method"
            )
        self.adapts = model.batch_norms.moves
        self.delta_refusal = None if self.adapts else "norm changes nothing, unless --set bn=recent lets it"
