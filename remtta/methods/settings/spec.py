"""A method by name: where it is, what it is, and its defaults. Imports torch only on use, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from remtta.errors import UsageError
from remtta.extensions import Extension
from remtta.methods.settings.base import PUBLISHED, MethodConfig, Preset

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
