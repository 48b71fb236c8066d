"""The methods of the core: the default, its cheaper relatives, REM and Tent. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from remtta.methods.settings.base import PUBLISHED, REMTTA, Preset
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.settings.spec import MethodSpec

_DEFAULT = replace(
    REMTTA,
    settings={
        **REMTTA.settings,
        "adapt_layers": "all",
        "mask_ratios": (0.0, 0.2),
        "ranking_weight": 2.0,
        "margin": 1.0,
    },
)
_ONE_MASK = Preset({"mask_ratios": (0.0, 0.1)})  # the paper's N = 1

METHODS: dict[str, MethodSpec] = {
    "remtta": MethodSpec(
        "remtta.methods.ensemble_rem:EnsembleREM",
        "the default: REM on the ensemble with the source model, with centered logits, a higher rate and an anchor",
        _DEFAULT,
        REMConfig,
    ),
    "light": MethodSpec(
        "remtta.methods.ensemble_rem:EnsembleREM",
        "deprecated: remtta --adapt-every 2",
        replace(_DEFAULT, settings={**_DEFAULT.settings, "adapt_every": 2}),
        REMConfig,
    ),
    "fast": MethodSpec(
        "remtta.methods.source:CenteredSource",
        "center, with recent statistics in batch norms: no training, one forward pass (two with batch norms)",
        Preset({"bn": "recent"}, answer="both"),
    ),
    "source": MethodSpec("remtta.methods.source:Source", "no adaptation: the baseline"),
    "center": MethodSpec(
        "remtta.methods.source:CenteredSource", "remove the offset common to all logits: one forward pass, no training"
    ),
    "centre": MethodSpec("remtta.methods.source:CenteredSource", "deprecated: center"),
    "tent": MethodSpec("remtta.methods.tent:Tent", "minimise the entropy of predictions (Wang et al., ICLR 2021)"),
    "rem": MethodSpec(
        "remtta.methods.rem:REM",
        "masked views: consistency and entropy ranking (Han et al., ICML 2025)",
        PUBLISHED,
        REMConfig,
    ),
    "rem-n1": MethodSpec(
        "remtta.methods.rem:REM", "REM with one masked view, in three quarters of the time", _ONE_MASK, REMConfig
    ),
}
"""Methods by name."""
