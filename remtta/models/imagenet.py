"""ImageNet's classes, from timm's files, which are read without importing timm, as that takes seconds."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

_SYNSETS = {
    1000: "imagenet_synsets.txt",
    11221: "imagenet21k_miil_synsets.txt",
    11821: "imagenet12k_synsets.txt",
    21841: "imagenet22k_synsets.txt",
    21842: "imagenet22k_ms_synsets.txt",
    21843: "imagenet21k_goog_synsets.txt",
}
"""By the number of classes."""


def read_info(file: str) -> str:
    """Return one of the texts on data sets that come with timm."""
    spec = find_spec("timm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("data").joinpath("_info", file).read_text(encoding="utf-8")


def wnids_of(num_classes: int) -> list[str]:
    """Return ImageNet's identifiers of a model's classes, by their number; none for other models."""
    file = _SYNSETS.get(num_classes)
    return [] if file is None else read_info(file).split()


def names_of(num_classes: int) -> list[str]:
    """Return ImageNet's names of a model's classes, by their number; none for other models."""
    if not (wnids := wnids_of(num_classes)):
        return []
    names = dict(csv.reader(read_info("imagenet_synset_to_lemma.txt").splitlines(), delimiter="\t"))
    return [names[wnid] for wnid in wnids]
