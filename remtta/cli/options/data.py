"""What `remtta eval` measures on: which images, and which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from remtta.cli.parsing import parse_names, parse_numbers
from remtta.errors import UsageError

if TYPE_CHECKING:
    from remtta.evaluation.protocols import Resize
    from remtta.evaluation.tables import Case

_ALL_SEVERITIES = "1,2,3,4,5"

_data = partial(typer.Option, rich_help_panel="Data")

Root = Annotated[Path, typer.Argument(help="ImageNet-C-like tree, tree of domains, or folder of CIFAR-C arrays.")]


@dataclass(frozen=True)
class Checkpoints:
    """The weights, of which there may be several."""

    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            rich_help_panel="Model",
            help="Weights: .safetensors, .pth/.pt/.tar, .npz. Default: timm's own. Several: an evaluation of each.",
        ),
    ] = None

    def by_case(self) -> dict[Case, Path | None]:
        """Each by its place in the grid, which has no such axis where there is one alone.

        Raises:
            UsageError: If one of several is not there, or named twice.
        """
        from remtta.evaluation.axes import checkpoint_names

        paths = self.checkpoint or []
        if len(paths) < 2:
            return {(): paths[0] if paths else None}
        return {(("checkpoint", name),): path for name, path in zip(checkpoint_names(paths), paths, strict=True)}


@dataclass(frozen=True)
class DataOptions:
    """Which labelled images."""

    domains: Annotated[str | None, _data(help="Which ones, in this order. Default: the standard order.")] = None
    severity: Annotated[
        str | None, _data(help="One or several of 1 to 5. Default: 5, or the only one there is; gradual has all.")
    ] = None
    apart: Annotated[
        bool,
        _data("--apart", help="Each severity, by default all five, by itself: from the source weights, in a table."),
    ] = False
    image_list: Annotated[Path | None, _data(help="Only these images, in this order: wnid/name per line.")] = None
    labels_file: Annotated[
        Path | None, _data(metavar="FILE", help="One domain of these images: path<TAB>class or path,class per line.")
    ] = None
    class_map: Annotated[Path | None, _data(help="Class folder and class number per line, or JSON.")] = None
    limit: Annotated[int | None, _data(min=1, help="At most so many images per domain.")] = None
    resize: Annotated[str, _data(help="auto (not if images have the input size already), always or never.")] = "auto"

    def checked_resize(self) -> Resize:
        """When images are resized.

        Raises:
            UsageError: If --resize has another value.
        """
        from remtta.evaluation.protocols import Resize

        if self.resize not in get_args(Resize):
            raise UsageError(f"--resize takes {', '.join(get_args(Resize))}, got {self.resize}")
        return self.resize  # type: ignore[return-value]  # as was checked

    def folders(self) -> dict[str, int] | None:
        """What --class-map says of class folders.

        Raises:
            UsageError: If it cannot be read.
        """
        from remtta.evaluation.classes import read_class_map

        return None if self.class_map is None else read_class_map(self.class_map)

    def by_case(self, scenario: str) -> dict[Case, Sequence[int] | None]:
        """The severities of each evaluation by its place in the grid; None is what the data has.

        Raises:
            UsageError: If they are none, or the scenario's business.
        """
        if scenario == "gradual" and (self.severity is not None or self.apart):
            option = "--severity" if self.severity is not None else "--apart"
            raise UsageError(f"the gradual scenario visits all severities; leave {option} out")
        asked = self.severity or (_ALL_SEVERITIES if scenario == "gradual" or self.apart else None)
        severities = None if asked is None else parse_numbers(asked, "--severity")
        if not set(severities or ()) <= set(range(1, 6)):
            raise UsageError(f"--severity takes numbers from 1 to 5, got {self.severity}")
        if not self.apart:
            return {(): severities}
        return {(("severity", str(severity)),): [severity] for severity in severities or ()}

    def selection(self) -> dict[str, Any]:
        """Arguments of `open_dataset` that say which images, but for their severities.

        Raises:
            UsageError: If a file cannot be read.
        """
        from remtta.evaluation.datasets import read_image_list

        return {
            "domains": parse_names(self.domains) or None,
            "image_list": None if self.image_list is None else read_image_list(self.image_list),
            "class_map": self.folders(),
            "limit": self.limit,
            "labels_file": self.labels_file,
        }
