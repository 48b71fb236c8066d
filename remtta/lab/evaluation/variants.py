"""Methods as an evaluation names them, `[LABEL=]METHOD[@cifar][+guard][+both][+smooth][+batchN]`; their settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from remtta.errors import UsageError, unknown
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.chosen import SharedSettings, default_method, flag_of, set_option
from remtta.methods.table import METHOD_SUMMARIES, METHOD_TABLE, check_method, method_config
from remtta.options import Action, Answer
from remtta.options.option import method_option, read_pairs

_ADAM: Mapping[str, object] = {"optimizer": "adam", "lr": 1e-3}
CIFAR: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("tent", "tent-come", "eta", "rdumb", "sar", "sar-come", "deyo", "roid", "cmf"), _ADAM),
    "eata": {**_ADAM, "fisher_weight": 1.0},
    "eata-come": {**_ADAM, "fisher_weight": 1.0},
    "cotta": {**_ADAM, "restore": 0.01},
    "petal": {**_ADAM, "restore": 0.03, "posterior_weight": 1e-9},
    "vida": {"optimizer": "adam", "lr": 1e-4, "adapter_lr": 1e-5, "adapter_decay": 0.999, "threshold": 0.05},
    "memo": {"optimizer": "sgd", "momentum": 0.0, "lr": 5e-3, "num_augmentations": 32},
}
"""Settings of METHOD@cifar: the official codes' of Tent, CoTTA, PETAL, ViDA and MEMO, for others those of ROID's
benchmark; all for batches of 200 but MEMO's.
"""

_NAME = re.compile(r"(?:(?P<label>.*)=)?(?P<method>[^@+]*)(?:@(?P<settings>[^+]*))?(?P<suffixes>.*)", re.DOTALL)
_SUFFIXES = ("guard", "both", "smooth")
_BATCH = re.compile(r"batch([1-9]\d*)")


@dataclass(frozen=True)
class MethodVariant:
    """A row of an evaluation's table: a method, and what is added to it.

    Attributes:
        name: As the user wrote it, in records and tables.
        label: Tells rows of the same method with settings of their own apart.
        cifar: Whether its defaults are the papers' for CIFAR.
        guard: Whether a guard is added to a method that has none by default.
        ensemble: Whether predictions are averaged with the source model's.
        smooth: Whether predictions are smoothed over ordered frames.
        batch_size: Images per batch; None: as for the other rows.
    """

    name: str
    method: str
    label: str | None = None
    cifar: bool = False
    guard: bool = False
    ensemble: bool = False
    smooth: bool = False
    batch_size: int | None = None

    @classmethod
    def parse(cls, name: str) -> MethodVariant:
        """Raise UsageError if there are suffixes that mean nothing; whether the method exists is not checked."""
        parts = _NAME.fullmatch(name)
        assert parts is not None  # it fits any text
        _, *suffixes = parts["suffixes"].split("+")
        sizes = [int(size[1]) for suffix in suffixes if (size := _BATCH.fullmatch(suffix))]
        for suffix in suffixes:
            if suffix not in _SUFFIXES and not _BATCH.fullmatch(suffix):
                if re.fullmatch(r"batch\d*", suffix):
                    raise UsageError(f"{name}: +batch needs a number of images from 1: +batch4")
                raise unknown("suffix", f"+{suffix}", [f"+{known}" for known in (*_SUFFIXES, "batchN")])
            if suffixes.count(suffix) > 1:
                raise UsageError(f"{name}: +{suffix} is there twice; leave one out")
        if len(sizes) > 1:
            raise UsageError(f"{name} has two batch sizes; leave one out")
        cifar = parts["settings"] is not None
        if cifar and (parts["settings"] != "cifar" or parts["method"] not in CIFAR):
            known = ", ".join(method for method in CIFAR if method in METHOD_TABLE)
            raise UsageError(f"{name}: @cifar, for settings for CIFAR, goes with {known}")
        guard, ensemble, smooth = (suffix in suffixes for suffix in _SUFFIXES)
        batch_size = sizes[0] if sizes else None
        return cls(name, parts["method"], parts["label"], cifar, guard, ensemble, smooth, batch_size)

    @property
    def defaults(self) -> Mapping[str, object]:
        """Settings that differ from the method's defaults."""
        return CIFAR[self.method] if self.cifar else {}

    @property
    def is_guarded(self) -> bool:
        return self.guard or METHOD_TABLE[self.method].preset.action != "off"

    @property
    def answer(self) -> Answer:
        """Which model predicts."""
        return "both" if self.ensemble else METHOD_TABLE[self.method].preset.answer

    @property
    def is_plain_source(self) -> bool:
        """True if it is the source model alone, whose predictions of an image are the same in any order."""
        return self.method == "source" and not (self.guard or self.ensemble or self.smooth)

    def action(self, configured: Action | None) -> Action:
        """Return the action of its guard, given the guards' configured action."""
        own = METHOD_TABLE[self.method].preset.action
        return configured or ("rollback" if own == "off" else own) if self.is_guarded else "off"


def parse_variants(names: Iterable[str]) -> dict[str, MethodVariant]:
    """Return the variants by name; raise UsageError if one is invalid, or two cannot be told apart."""
    variants: dict[str, MethodVariant] = {}
    labels = set[str]()
    for name in names:
        variant = MethodVariant.parse(name)
        check_method(variant.method, METHOD_TABLE)
        if name in variants:
            raise UsageError(f"{name} is named twice; LABEL={name} runs it again with settings of its own")
        variants[name] = variant
        if (label := variant.label) is None:
            continue
        if not re.fullmatch(r"[A-Za-z0-9_-]+", label) or label in METHOD_TABLE:
            raise UsageError(
                f'{name}: "{label}" cannot label a method; take letters, digits, - and _, and no method\'s name'
            )
        if label in labels:
            raise UsageError(f'two methods are labelled "{label}"; give each a label of its own')
        labels.add(label)
    if not variants:
        raise UsageError(f"no method is named; choose {', '.join(METHOD_SUMMARIES)}")
    return variants


@dataclass(frozen=True)
class MethodsOptions:
    """The methods of an evaluation."""

    methods: Annotated[
        tuple[str, ...] | None,
        method_option(
            f"Methods to compare, of {', '.join(METHOD_SUMMARIES)}. tent@cifar has the papers' settings for CIFAR; "
            "rem+guard adds the guard, rem+both averages with the source model, rem+smooth smooths over ordered "
            "frames, rem+batch4 has batches of 4; LABEL=rem adds a row with its own settings (--set LABEL.KEY=VALUE).",
            metavar="A,B",
            default="source,remtta; for an ONNX file source,fast",
            complete=METHOD_SUMMARIES,
            common=True,
            more="methods.md",
        ),
    ] = None
    shared: SharedSettings = field(default_factory=SharedSettings)
    pairs: Annotated[
        Sequence[str],
        set_option("Setting of one method or label, such as tent.lr=1e-4 (repeatable).", metavar="METHOD.KEY=VALUE"),
    ] = ()

    def __post_init__(self) -> None:
        if self.methods is not None:
            parse_variants(self.methods)

    def configs(self, batch_size: int, model: str | None = None) -> dict[str, MethodConfig]:
        """Return a config per method: its defaults, overridden by the shared settings that it has and its own --set
        values; raise UsageError if a setting or a value is unknown, or no method has one of the shared settings. The
        model's name decides where no method is named.
        """
        variants, configs = parse_variants(self.methods or ("source", default_method(model))), {}
        own = self._own_settings(variants.values())
        used: set[str] = set()
        for name, variant in variants.items():
            known = METHOD_TABLE[variant.method].config.setting_names()
            applying = {key: value for key, value in self.shared.given.items() if key in known}
            used |= applying.keys()
            configs[name] = method_config(
                variant.method,
                {**variant.defaults, **applying, **own[name]},
                batch_size=variant.batch_size or batch_size,
            )
        if unused := sorted(self.shared.given.keys() - used):
            raise UsageError(f"none of {', '.join(own)} has {', '.join(map(flag_of, unused))}")
        return configs

    def _own_settings(self, variants: Iterable[MethodVariant]) -> dict[str, dict[str, Any]]:
        """Return the --set values of each variant by name."""
        own: dict[str, dict[str, Any]] = {variant.name: {} for variant in variants}
        # Values given for a method apply to all its rows, unless overridden for a label.
        for text in sorted(self.pairs, key=lambda text: text.partition(".")[0] not in METHOD_TABLE):
            method, _, setting = text.partition(".")
            meant = [each.name for each in variants if method in (each.name, each.label, each.method)]
            if not meant:
                raise UsageError(f"--set {text}: write METHOD.KEY=VALUE with a method of --methods ({', '.join(own)})")
            for name in meant:
                own[name] |= read_pairs([setting], "--set")
        return own
