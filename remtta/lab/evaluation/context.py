"""The inputs of an evaluation, their record, and the comparison with an earlier record."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from remtta.deltas.delta import Delta
from remtta.errors import UsageError
from remtta.files import from_json, to_json
from remtta.lab.evaluation.domains import Dataset, title_of
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.variants import MethodVariant
from remtta.methods.base import Method
from remtta.methods.build import build_method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.renamed import current_record
from remtta.methods.table import METHOD_TABLE
from remtta.models.info import ModelInfo
from remtta.models.preprocessing import preprocessing_of
from remtta.options.option import fixed_fields
from remtta.pipeline.build import assemble_pipeline
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.precision import recorded_precision
from remtta.pipeline.smoothing import Smoother
from remtta.runs.folder import check_same_settings
from remtta.runs.reading import read_record

Settings = dict[str, Any]
"""The `settings` in `results.json`."""


@dataclass(frozen=True)
class EvaluationContext:
    """The inputs of an evaluation, fixed before its first image."""

    model: nn.Module  # the classifier, with its head restricted to the dataset's classes if needed
    info: ModelInfo
    dataset: Dataset
    variants: Mapping[str, MethodVariant]  # by name, in the order of the table
    methods: Mapping[str, MethodConfig]  # settings of those to run, likewise
    options: EvalOptions
    numbers: Sequence[int]  # the class number of each of the head's outputs
    num_classes: int  # number of classes of the whole head
    start: Delta | None  # the delta from which every trial starts, if any
    # Source statistics by method; filled before anything is recorded.
    learned: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Passes per image that a method learns from, those of the source model included; filled by `check`.
    passes: dict[str, float] = field(default_factory=dict)

    def settings(self, order: Iterable[str] | None = None) -> Settings:
        """Return everything that determines the results, as read from JSON; with methods in this order."""
        options = {name: value for name, value in asdict(self.options).items() if name in fixed_fields(EvalOptions)}
        if math.isinf(self.options.imbalance):
            options["imbalance"] = "infinity"  # JSON cannot represent infinity
        dataset, info = self.dataset, self.info
        domains = [
            {
                "name": domain.name,
                "severity": domain.severity,
                "images": len(domain.sources),
                "labels_sha256": hashlib.sha256(np.ascontiguousarray(domain.labels).data).hexdigest(),
                "first_image_sha256": domain.first_image_sha256,
            }
            for domain in dataset.domains
        ]
        settings = {
            "data": {
                "root": str(dataset.root),
                "layout": dataset.layout,
                "classes": dataset.classes,
                "restricted_to": dataset.restricted_to,
                "domains": domains,
            },
            "model": {**info.origin, "base_sha256": info.sha256},
            "preprocessing": info.preprocessing.as_dict(),
            "methods": {name: self.methods[name].used() for name in order or self.methods},
            "options": options,
            "device": str(info.device),
            **({"start_delta": self.start.origin} if self.start else {}),
            **({"source_statistics": self.learned} if self.learned else {}),
        }
        return from_json(to_json(settings))

    def batch_size(self, name: str) -> int:
        """Return the images per batch of a method."""
        return self.variants[name].batch_size or self.options.batch_size

    @contextlib.contextmanager
    def pipeline(self, name: str) -> Iterator[Pipeline]:
        """Build a method with the additions of its name and its source statistics; restore the model afterwards."""
        guard, variant = self.options.guard, self.variants[name]
        options = replace(guard, action=variant.action(guard.action), answer=variant.answer)
        smoother = Smoother(len(self.numbers)) if variant.smooth else None
        method = build_method(variant.method, self.model, self.methods[name])
        try:
            method.reset()
            pipeline = assemble_pipeline(method, options, smoother)
            is_off = pipeline.guard is None or pipeline.guard.options.action == "off"
            if is_off and variant.guard and METHOD_TABLE[variant.method].preset.action == "off":
                raise UsageError(f"{variant.method} changes no weights that a guard could restore; leave +guard out")
            if name in self.learned:
                self._learn(method, name, self.learned[name]["path"])
            yield pipeline
        finally:
            method.reset()

    def check(self) -> None:
        """Raise UsageError if a method does not suit the model, or a guard is requested where there can be none."""
        for name in self.methods:
            try:
                with self.pipeline(name) as pipeline:
                    method, variant = pipeline.method, self.variants[name]
                    per_update, both = sum(method.passes()), variant.is_guarded or variant.answer == "both"
                    self.passes[name] = 1 + both + (per_update - 1) / method.config.adapt_every
            except UsageError as error:
                raise type(error)(f"{name}: {error}") from None

    def learn(self, source_data: str | Path, wait: Callable[[], None]) -> None:
        """Compute or load the source statistics of every method that needs them, and record them in `learned`."""
        for name in self.methods:
            with self.pipeline(name) as pipeline:
                if pipeline.method.needs_source_data:
                    self.learned[name] = self._learn(pipeline.method, name, source_data, wait)

    def _learn(
        self, method: Method[MethodConfig], name: str, source_data: str | Path, wait: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        chosen, crop_pct = self.info.preprocessing, preprocessing_of(self.model).crop_pct
        # Domains of the input size are used uncropped, which does not say how to crop photographs.
        as_they_are = chosen.crop_pct == 1 and set(self.dataset.sizes) == {chosen.input_size[::-1]}
        return method.learn_from_source(
            source_data,
            name=self.variants[name].method,
            preprocessing=replace(chosen, crop_pct=crop_pct) if as_they_are else chosen,
            fitting_as_they_are=as_they_are and crop_pct != 1,
            wait=wait,
        )

    def order_after(self, earlier: Settings, folder: Path, finished: Collection[str]) -> list[str]:
        """Return methods in the order in which they run: those of the earlier evaluation that are finished or
        unchanged, then others; raise UsageError if a finished one or a seed is missing, or another setting changed.
        """
        now = self.settings()
        if set(earlier["options"]["seeds"]) <= set(self.options.seeds):  # more may be added
            earlier = {**earlier, "options": {**earlier["options"], "seeds": now["options"]["seeds"]}}
        methods = now["methods"]
        first = [name for name, used in earlier["methods"].items() if name in finished or used == methods.get(name)]
        if missing := [name for name in first if name not in methods]:
            raise UsageError(
                f"the evaluation in {folder} also has {', '.join(missing)}, and --resume keeps all finished methods: "
                f"add {'it' if len(missing) == 1 else 'them'} to --methods, or choose another --output"
            )
        check_same_settings(_comparable(earlier, first), _comparable(now, first))
        return list(dict.fromkeys([*first, *methods]))


def _comparable(settings: Settings, methods: Sequence[str]) -> Settings:
    """Return the settings restricted to these methods, with data, delta and statistics condensed for messages."""
    data, start, learned = settings["data"], settings.get("start_delta"), settings.get("source_statistics", {})
    domains = {
        title_of(domain["name"], domain["severity"]): f"{domain['images']} images, "
        f"{domain['labels_sha256'][:6]} {str(domain.get('first_image_sha256'))[:6]}"
        for domain in data["domains"]
    }
    return {
        **settings,
        "data": {**data, "domains": domains},
        "methods": {name: settings["methods"][name] for name in methods},
        "start_delta": start and f"{start['method']}, {start['frames']} frames, {str(start['file_sha256'])[:16]}",
        "source_statistics": {name: learned[name]["tensors_sha256"][:32] for name in methods if name in learned},
    }


def read_earlier(record: Path) -> dict[str, Any]:
    """Read the results so far of an evaluation from its `results.json`. Raise RemttaError if it cannot be read;
    UsageError if it is not the record of an evaluation.
    """
    earlier = read_record(record)
    settings = earlier.get("settings")
    if "status" not in earlier or not isinstance(settings, Mapping) or not isinstance(settings.get("methods"), Mapping):
        raise UsageError(f"{record} is damaged (not the record of an evaluation); start again with --overwrite")
    methods = {name: current_record(used) for name, used in settings["methods"].items()}
    for used in methods.values():
        if used.get("precision") == "auto":  # of an earlier version
            used["precision"] = recorded_precision(used)
    return {**earlier, "settings": {**settings, "methods": methods}}
