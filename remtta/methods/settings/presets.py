"""What is done where nothing is asked for: this project's choice, or the papers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from remtta.errors import UsageError
from remtta.methods.settings import MethodConfig, method_config
from remtta.methods.settings.names import FAST, PRESET, method_of, preset_in
from remtta.options import Action, Answer

PresetName = Literal["remtta", "fast", "paper"]


@dataclass(frozen=True)
class Preset:
    """Defaults that go together.

    Attributes:
        method: The method.
        action: The guard's.
        answer: Who answers.
        settings: Settings of some methods in place of the published ones, by method.
    """

    method: str
    action: Action
    answer: Answer
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self, method: str, given: Mapping[str, Any], *, batch_size: int) -> MethodConfig:
        """A method's config: what was given, this preset's settings for the rest, and the published ones.

        The preset's are a pair of rate and anchor for Adam, so another optimizer leaves them out. In batches smaller
        than `FULL_BATCH` its rate is smaller in proportion, so that about as many frames count as in full ones.

        Raises:
            UsageError: As of `method_config`.
        """
        own = self.settings.get(method, {}) if given.get("optimizer", "adam") == "adam" else {}
        if "lr" in own:
            own = {**own, "lr": own["lr"] * min(1.0, batch_size / FULL_BATCH)}
        return method_config(method, {**own, **given}, batch_size=batch_size)


FULL_BATCH = 20
"""Frames from which on a batch tells enough for the preset's whole rate."""

_STEADY = {"lr": 0.01, "anchor": "auto"}
_REM = dict.fromkeys(("rem", "rem-n1", "rem-come"), _STEADY)

PRESETS: dict[str, Preset] = {
    PRESET: Preset("rem", "rollback", "auto", _REM),
    FAST: Preset("tent", "rollback", "auto", {**_REM, "tent": {"optimizer": "adam", **_STEADY}}),
    "paper": Preset("rem", "off", "adapted"),
}
"""By their names on the command line; measured in `docs/results.md`."""


def named_config(name: str, settings: Mapping[str, Any], *, batch_size: int) -> MethodConfig:
    """The config of a method by its name in an evaluation, which may stand for the preset's settings.

    Raises:
        UsageError: As of `method_config`.
    """
    return PRESETS[preset_in(name) or "paper"].config(method_of(name), settings, batch_size=batch_size)


def preset_of(name: str) -> Preset:
    """The preset of a name.

    Raises:
        UsageError: If there is none.
    """
    if name not in PRESETS:
        raise UsageError(f'unknown preset "{name}"; choose {" or ".join(PRESETS)}')
    return PRESETS[name]
