"""Methods by their names, set up on models."""

from __future__ import annotations

from torch import nn

from remtta.errors import UsageError
from remtta.methods.method import Method, Updater
from remtta.methods.settings import METHOD_TABLE, MethodConfig, check_method, method_config
from remtta.options import DEFAULT_BATCH_SIZE


def build_method(name: str, model: nn.Module, config: MethodConfig | None = None) -> Method:
    """Set up a method of METHOD_TABLE on a model, which it adapts in place; with its defaults if there is no config.

    Raises:
        UsageError: If there is no such method, or its settings do not suit the model.
        ModelError: If the method cannot adapt the model.
    """
    check_method(name, METHOD_TABLE)
    config = config or method_config(name, {}, batch_size=DEFAULT_BATCH_SIZE)
    try:
        return Updater(model, config, METHOD_TABLE[name].objective)
    except UsageError:
        raise
    except ValueError as error:  # such as a mask ratio that leaves no patch of this model
        raise UsageError(str(error)) from error
