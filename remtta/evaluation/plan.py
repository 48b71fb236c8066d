"""What an evaluation is made of, and what of it goes into the records."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from torch import nn

from remtta.deltas.delta import Delta
from remtta.errors import UsageError
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.scenarios import Visit
from remtta.methods.settings import METHOD_TABLE, MethodConfig, method_config
from remtta.methods.settings.names import check_method_names, method_of
from remtta.models.card import ModelCard
from remtta.options import EvalOptions
from remtta.options.option import fixed_fields


@dataclass(frozen=True)
class EvalPlan:
    """What an evaluation is made of, fixed before its first image.

    Attributes:
        model: The classifier, its head cut to the data set's classes.
        card: Its card.
        dataset: The domains.
        methods: Settings by name, in the order of the table.
        options: Scenario, batch size, seeds and the like.
        visits: Those of each seed, in order.
        numbers: The class that each of the head's outputs stands for.
        start: The delta that every run starts from, if there is one.
        learned: What methods learned from source images, by name; filled before anything is recorded.
    """

    model: nn.Module
    card: ModelCard
    dataset: Dataset
    methods: Mapping[str, MethodConfig]
    options: EvalOptions
    visits: Mapping[int, Sequence[Visit]]
    numbers: Sequence[int]
    start: Delta | None
    learned: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Everything that the numbers depend on, ready for JSON."""
        options = {name: value for name, value in asdict(self.options).items() if name in fixed_fields(EvalOptions)}
        if math.isinf(self.options.imbalance):
            options["imbalance"] = "infinity"  # which JSON has no number for
        return {
            "data": _data_settings(self.dataset),
            "model": {**self.card.origin, "base_sha256": self.card.sha256},
            "preprocessing": self.card.preprocessing.as_dict(),
            "methods": {name: settings_of(config) for name, config in self.methods.items()},
            "options": options,
            "device": str(self.card.device),
            **({"start_delta": self.start.origin} if self.start else {}),
            **({"source_statistics": self.learned} if self.learned else {}),
        }


def _data_settings(dataset: Dataset) -> dict[str, Any]:
    domains = [
        {
            "name": domain.name,
            "severity": domain.severity,
            "images": len(domain.sources),
            "labels_sha256": hashlib.sha256(np.ascontiguousarray(domain.labels).data).hexdigest(),
        }
        for domain in dataset.domains
    ]
    return {
        "root": str(dataset.root),
        "layout": dataset.layout,
        "classes": dataset.classes,
        "restricted_to": dataset.restricted_to,
        "domains": domains,
    }


def settings_of(config: MethodConfig) -> dict[str, Any]:
    """Those of a method's settings that it has a use for, as JSON gives them back."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if name not in config.unused
    }


def checked_methods(
    methods: Mapping[str, MethodConfig | None] | Sequence[str], batch_size: int
) -> dict[str, MethodConfig]:
    """Every method's settings, those of its name where none are given.

    Raises:
        UsageError: If a name is unknown, or settings are not of the method's kind.
    """
    check_method_names(list(methods))
    given = methods if isinstance(methods, Mapping) else dict.fromkeys(methods)
    chosen = {}
    for name, config in given.items():
        kind = METHOD_TABLE[method_of(name)].config
        chosen[name] = method_config(method_of(name), {}, batch_size=batch_size) if config is None else config
        if not {entry.name for entry in fields(kind)} <= vars(chosen[name]).keys():
            raise UsageError(f"{name} takes its settings as a {kind.__name__}, got a {type(config).__name__}")
    return chosen
