"""Every method by its name.

A new method is one file with a class that keeps the `Method` protocol (most
subclass `GradientMethod` and write a loss), a config in `remtta.methods.settings`,
and a line in METHODS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from remtta.errors import UsageError
from remtta.methods.becotta import BECoTTA
from remtta.methods.clipartt import CLIPArTT
from remtta.methods.cmf import CMF
from remtta.methods.come import EATACOME, REMCOME, SARCOME, TentCOME
from remtta.methods.continual_mae import ContinualMAE
from remtta.methods.cotta import CoTTA
from remtta.methods.deyo import DeYO
from remtta.methods.eata import EATA
from remtta.methods.ecotta import EcoTTA
from remtta.methods.eta import ETA
from remtta.methods.foa import FOA
from remtta.methods.lame import LAME
from remtta.methods.memo import MEMO
from remtta.methods.method import Method
from remtta.methods.norm import NORM
from remtta.methods.petal import PETAL
from remtta.methods.pseudo_label import PseudoLabel
from remtta.methods.rdumb import RDumb
from remtta.methods.rem import REM
from remtta.methods.roid import ROID
from remtta.methods.sar import SAR
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig, check_method
from remtta.methods.source import Source
from remtta.methods.supervised import Supervised
from remtta.methods.tent import Tent
from remtta.methods.tpt import TPT
from remtta.methods.vdp import VDP
from remtta.methods.vida import ViDA
from remtta.methods.watt import REMWATT, WATT

METHODS: dict[str, Callable[[nn.Module, Any], Method]] = {
    "source": Source,
    "norm": NORM,
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
    "ecotta": EcoTTA,
    "becotta": BECoTTA,
    "watt": WATT,
    "rem-watt": REMWATT,
    "clipartt": CLIPArTT,
    "tpt": TPT,
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
    check_method(name, METHODS)
    try:
        return METHODS[name](model, config or METHOD_CONFIGS[name]())
    except UsageError:
        raise
    except ValueError as error:  # such as a mask ratio that leaves no patch of this model
        raise UsageError(str(error)) from error
