"""How a method adapts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from remtta.cli.completion import stream_methods
from remtta.cli.parsing import parse_mask_ratios, parse_number, parse_pairs
from remtta.cli.reporting import refused_values
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig, REMConfig, check_method
from remtta.methods.settings.base import Optimizer, Precision
from remtta.methods.settings.names import PRESET
from remtta.methods.settings.presets import PRESETS, PresetName, preset_of
from remtta.options import DEFAULT_BATCH_SIZE, Adapt, RunOptions

_option = partial(typer.Option, rich_help_panel="Method")

_log = logging.getLogger("remtta")

_METHODS = [name for name in METHOD_CONFIGS if name != "supervised"]  # which needs labels
_RATE = PRESETS[PRESET].settings["rem"]["lr"]
_MASK_RATIOS = ",".join(f"{ratio:g}" for ratio in REMConfig.mask_ratios)


@dataclass(frozen=True)
class SharedSettings:
    """Settings of many methods, by the names that their configs have for them; and the batch size."""

    mask_ratios: Annotated[
        str | None,
        _option(help=f"Fractions of patch tokens to mask, 0 first. rem: {_MASK_RATIOS}.", show_default=False),
    ] = None
    ranking_weight: Annotated[
        float | None,
        _option("--lambda", help=f"Weight of the entropy ranking loss. rem: {REMConfig.ranking_weight:g}."),
    ] = None
    margin: Annotated[
        float | None,
        _option(help=f"Entropy gap between views, as a fraction of log C. rem: {REMConfig.margin:g}."),
    ] = None
    lr: Annotated[float | None, _option(help=f"rem: {REMConfig.lr:g}; in adapt {_RATE:g}, by its preset.")] = None
    optimizer: Annotated[Optimizer | None, _option(help=f"rem: {REMConfig.optimizer}.")] = None
    momentum: Annotated[
        float | None, _option(help=f"SGD's momentum or Adam's first beta. rem: {REMConfig.momentum:g}.")
    ] = None
    steps: Annotated[int | None, _option(help=f"Optimizer steps per batch. rem: {REMConfig.steps}.")] = None
    anchor: Annotated[
        str | None,
        _option(
            metavar="SHARE|auto",
            help="Share of the way back to the source weights after each step: 0, as published, to under 1; auto: by "
            "Adam's rate, 1 - exp(-10 lr), in adapt rem's by its preset.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, _option("--batch-size", "-b", min=1, help=f"Images per update. Default: {DEFAULT_BATCH_SIZE}.")
    ] = None
    micro_batch: Annotated[int | None, _option(help="Frames per forward pass: same result, less memory.")] = None
    adapt_layers: Annotated[
        str | None,
        _option(help='Blocks whose norms adapt, such as 0-8, or "all". rem: the first three quarters.'),
    ] = None

    def given(self, precision: Precision) -> dict[str, Any]:
        """The settings that were given, and the precision, by the configs' field names.

        Raises:
            UsageError: If --mask-ratios are no numbers.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "batch_size"}
        if self.mask_ratios is not None:
            settings["mask_ratios"] = parse_mask_ratios(self.mask_ratios)
        if self.anchor not in (None, "auto"):
            settings["anchor"] = parse_number(self.anchor, "--anchor")
        return {name: value for name, value in settings.items() if value is not None} | {"precision": precision}


@dataclass(frozen=True)
class StreamSettings(SharedSettings):
    """The same for a stream, whose batch size no protocol decides."""

    batch_size: Annotated[int, _option("--batch-size", "-b", help="Frames per update.")] = DEFAULT_BATCH_SIZE


@dataclass(frozen=True)
class SourceDataOptions:
    """What methods that learn from source images first have of them."""

    source_data: Annotated[
        Path | None,
        _option(
            metavar="FOLDER",
            help="Clean unlabelled images of the source domain, or the statistics (.safetensors) an earlier run "
            "computed from some, for methods that learn from them first.",
        ),
    ] = None

    def checked(self, methods: Iterable[str], *, calibrates: bool = False) -> Path | None:
        """The path, if these methods want one, or something is calibrated on it.

        Raises:
            UsageError: If a method lacks it, or none learns from it.
        """
        from remtta.methods.source_data import check_source_data

        check_source_data(methods, self.source_data, calibrates=calibrates)
        return self.source_data


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The one method of a stream."""

    method: Annotated[
        str | None,
        _option(
            help=f"{', '.join(_METHODS)}; see remtta methods. Default: by the preset, rem or tent.",
            autocompletion=stream_methods,
        ),
    ] = None
    preset: Annotated[
        PresetName,
        _option(
            help="What holds where nothing else is asked for: remtta, what helps most and harms least by this "
            "project's measurements; fast, the same with Tent for REM, in half of the time; paper, the method as "
            "published: its rate, no anchor, guard off, answer adapted."
        ),
    ] = "remtta"
    adapt: Annotated[
        Adapt,
        _option(
            help="always: learn from every batch; auto: from what is new, and only now and then from more of the same, "
            "whose frames then cost one forward pass."
        ),
    ] = RunOptions.adapt
    shared: StreamSettings
    settings: Annotated[
        list[str] | None,
        _option("--set", metavar="KEY=VALUE", help="Any other setting of the method (repeatable)."),
    ] = None
    source: SourceDataOptions
    episodic: Annotated[bool, _option("--episodic", help="Back to the source weights before every batch.")] = False
    reset_every: Annotated[int | None, _option(help="Back to the source weights after this many frames.")] = None

    @property
    def name(self) -> str:
        """The method's name: the preset's where none is given."""
        return preset_of(self.preset).method if self.method is None else self.method

    @property
    def adapts(self) -> bool:
        """Whether it learns anything."""
        return self.name != "source"

    def check(self) -> None:
        """Refuse a method that there is not."""
        check_method(self.name, _METHODS)

    @refused_values()
    def config(self, precision: Precision) -> MethodConfig:
        """The method's config: its defaults, the options it has, and what --set says.

        Raises:
            UsageError: If it has no such setting, or a value is out of range.
        """
        settings = self.shared.given(precision) | self._forgetting() | parse_pairs(self.settings, "--set")
        for name in METHOD_CONFIGS[self.name].unused:
            if settings.get(name):
                _log.warning("%s has no use for the setting %s=%s", self.name, name, settings[name])
        return preset_of(self.preset).config(self.name, settings, batch_size=self.shared.batch_size)

    def _forgetting(self) -> dict[str, Any]:
        """--episodic where it was given: some methods are so by default."""
        return {"episodic": True} if self.episodic else {}
