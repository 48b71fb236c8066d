"""The methods of the core by name, and what is known of a method before torch is loaded, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from remtta.errors import UsageError
from remtta.extensions import Extension
from remtta.methods.settings.base import PUBLISHED, REMTTA, MethodConfig, Preset
from remtta.methods.settings.rem_config import REMConfig

if TYPE_CHECKING:
    from remtta.methods.base import Method


@dataclass(frozen=True)
class MethodSpec:
    """A method name, as used in every command and in Python."""

    location: str | Extension  # its class, as "module:class", or as the extension of another package
    summary: str  # a one-line description
    default_preset: Preset = PUBLISHED  # its preset; a method of another package has its own
    config_class: type[MethodConfig] | None = None  # the class of its settings, if it is known without loading torch
    needs_labels: bool = False  # so that it does not run on a stream
    zero_shot: bool = False  # whether it accepts only zero-shot models

    @property
    def method(self) -> type[Method[MethodConfig]]:
        """The class of the method; importing it loads torch. Raise UsageError if another package's is no method."""
        if isinstance(self.location, Extension):
            return _checked(self.location)
        module, _, name = self.location.partition(":")
        return getattr(import_module(module), name)

    @property
    def config(self) -> type[MethodConfig]:
        """The class of its settings."""
        return self.config_class or self.method.settings

    @property
    def preset(self) -> Preset:
        """Its default settings, guard action and answer."""
        return self.method.preset if isinstance(self.location, Extension) else self.default_preset


def _checked(extension: Extension) -> type[Method[MethodConfig]]:
    """Return the method class of another package."""
    from remtta.methods.base import Method

    found, owner = extension.load(), f"{extension.target} of {extension.owner}"
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UsageError(f"{owner} is not a method: not a subclass of remtta.methods.base.Method")
    if not (hasattr(found, "loss") or found.predicts_after_update or found.predict is not Method.predict):
        raise UsageError(f"{owner} defines no loss(images, center)")
    if "__dataclass_params__" not in vars(found.settings):
        raise UsageError(f"{owner} has settings without @dataclass(frozen=True): {found.settings.__name__}")
    if not isinstance(found.preset, Preset):
        raise UsageError(f"{owner} has a preset that is no remtta.methods.settings.base.Preset: {found.preset!r}")
    return found


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
