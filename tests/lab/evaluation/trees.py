"""Small labelled trees of drawn images, and evaluations on them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.tally import Tallies, tally_rows
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import METHOD_TABLE
from tests.conftest import NUM_CLASSES, png, tiny_vit

CLASSES = [f"class_{letter}" for letter in "abcdefg"]


def write_tree(
    root: Path,
    domains: Sequence[str] = ("gaussian_noise", "fog", "my_own"),
    severities: Sequence[int] = (5,),
    classes: Sequence[str] = CLASSES,
    each: int = 3,
    size: int = 32,
) -> Path:
    """Write an ImageNet-C-like tree; without severities, a tree of domains."""
    for place, domain in enumerate(domains):
        for severity in severities or (0,):
            for number, name in enumerate(classes):
                folder = root / domain / (str(severity) if severities else "") / name
                folder.mkdir(parents=True)
                for copy in range(each):
                    seed = place * 10_000 + severity * 1000 + number * 10 + copy
                    (folder / f"{copy}.png").write_bytes(png(seed, size, size))
    return root


def methods_of(*names: str, **changes: Any) -> dict[str, MethodConfig]:
    """The configs of methods, each changed where it uses the setting."""
    kinds = {name: METHOD_TABLE[name].config for name in names}
    return {
        name: kind(**{key: value for key, value in changes.items() if key in kind.setting_names()})
        for name, kind in kinds.items()
    }


def open_tree(root: str | Path, **changes: Any) -> Dataset:
    return open_dataset(root, num_classes=NUM_CLASSES, **changes)


def evaluate_tiny(
    dataset: Dataset,
    folder: Path,
    methods: Mapping[str, Any] | Sequence[str] = ("source",),
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate methods on a small model; `options` are fields of `EvalOptions`, or arguments of `evaluate`."""
    arguments = {name: options.pop(name) for name in ("delta", "interrupts") if name in options}
    return evaluate(model or tiny_vit(), dataset, folder, methods=methods, options=EvalOptions(**options), **arguments)


def tally_of(folder: Path, *rows: Mapping[str, Any], by_path: bool = False) -> Tallies:
    """Count rows of one trial, in the adapt phase."""
    path, common = folder / "rows.jsonl", {"method": "source", "seed": 0, "phase": "adapt"}
    path.write_text("".join(json.dumps(common | dict(row)) + "\n" for row in rows))
    return tally_rows(path, by_path=by_path)
