"""Every method by its name.

A new method is one file with an `Objective` (most only write a loss), a config in
`remtta.methods.settings`, and a line in METHODS.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from remtta.errors import UsageError
from remtta.methods.method import Method, Updater
from remtta.methods.objective import Objective
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig, algorithm_of, check_method, method_config
from remtta.options import DEFAULT_BATCH_SIZE

METHODS: dict[str, str | type[Objective[Any]]] = {
    "source": "source.Source",
    "centre": "source.CentredSource",
    "norm": "norm.NORM",
    "pseudo-label": "pseudo_label.PseudoLabel",
    "tent": "tent.Tent",
    "tent-come": "come.TentCOME",
    "eta": "eta.ETA",
    "eata": "eata.EATA",
    "eata-come": "come.EATACOME",
    "rdumb": "rdumb.RDumb",
    "sar": "sar.SAR",
    "sar-come": "come.SARCOME",
    "deyo": "deyo.DeYO",
    "roid": "roid.ROID",
    "cmf": "cmf.CMF",
    "rem": "rem.RankedEntropy",
    "rem-n1": "rem.RankedEntropy",
    "rem-come": "come.REMCOME",
    "supervised": "supervised.Supervised",
    "cotta": "cotta.CoTTA",
    "lame": "lame.LAME",
    "memo": "memo.MEMO",
    "foa": "foa.FOA",
    "vida": "vida.ViDA",
    "continual-mae": "continual_mae.ContinualMAE",
    "petal": "petal.PETAL",
    "vdp": "vdp.VDP",
    "ecotta": "ecotta.EcoTTA",
    "becotta": "becotta.BECoTTA",
    "watt": "watt.WATT",
    "rem-watt": "watt.REMWATT",
    "clipartt": "clipartt.CLIPArTT",
    "tpt": "tpt.TPT",
}
"""The objective of every algorithm, or its module and class; `METHOD_TABLE` says which one runs under a name."""


def objective_of(name: str) -> type[Objective[Any]]:
    """Return a method's objective.

    Raises:
        UsageError: If there is no such method.
    """
    check_method(name, METHOD_CONFIGS)
    place = METHODS[algorithm_of(name)]
    if not isinstance(place, str):
        return place
    module, _, kind = place.rpartition(".")
    objective: type[Objective[Any]] = getattr(import_module(f"remtta.methods.{module}"), kind)
    return objective


def build_method(name: str, model: nn.Module, config: MethodConfig | None = None) -> Method:
    """Set up a method on a model.

    Args:
        name: One of METHOD_TABLE.
        model: The model, adapted in place.
        config: The method's own kind of config; its defaults if None.

    Raises:
        UsageError: If there is no such method, or its settings do not suit the model.
        ModelError: If the method cannot adapt the model.
    """
    objective = objective_of(name)
    try:
        return Updater(model, config or method_config(name, {}, batch_size=DEFAULT_BATCH_SIZE), objective)
    except UsageError:
        raise
    except ValueError as error:  # such as a mask ratio that leaves no patch of this model
        raise UsageError(str(error)) from error
