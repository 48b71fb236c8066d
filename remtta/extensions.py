"""The extension points: methods, backbones, loaders, callbacks and commands, of remtta's parts and of other packages.

An extension is a name and the object that it stands for, `module:object`, imported on use so that `--help` is fast.
Another package declares its extensions as entry points of the group `remtta.methods`, `remtta.backbones`, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from remtta.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

Point = Literal["methods", "backbones", "loaders", "callbacks", "commands"]

PARTS = ("baselines", "zero_shot", "formats", "deployment", "lab")
"""The parts of remtta that its core does not need: packages that may be missing."""

_BUILT_IN: dict[Point, dict[str, str]] = {
    "methods": {
        "core": "remtta.methods.settings.core:METHODS",
        "baselines": "remtta.baselines:METHODS",
        "zero_shot": "remtta.zero_shot:METHODS",
        "lab": "remtta.lab:METHODS",
    },
    "backbones": {"onnx": "remtta.formats.onnx_model:FAMILIES"},
    "loaders": {
        "onnx": "remtta.formats.loaders:OnnxLoader",
        "transformers": "remtta.formats.loaders:TransformersLoader",
        "demo": "remtta.lab.demo.demo_model:DemoLoader",
        "zero-shot": "remtta.zero_shot.loader:ZeroShotLoader",
        "timm": "remtta.models.timm_loader:TimmLoader",
    },
    "callbacks": {
        "streams": "remtta.deployment.streams_command:ManyStreams",
        "health": "remtta.deployment.health:Health",
        "metrics": "remtta.deployment.metrics:Metrics",
        "annotate": "remtta.deployment.annotated:AnnotatedVideo",
        "mqtt": "remtta.deployment.mqtt:Publisher",
        "publish": "remtta.deployment.publishing:ModelPublisher",
        "save-frames": "remtta.lab.saved_frames:SavedFrames",
    },
    "commands": {
        "export": "remtta.formats.commands:export",
        "text-embed": "remtta.zero_shot.commands:text_embed",
        "eval": "remtta.lab.commands.eval:evaluate",
        "doctor": "remtta.lab.commands.doctor:doctor",
        "corrupt": "remtta.lab.commands.corrupt:corrupt",
        "demo": "remtta.lab.commands.demo:demo",
        "bench": "remtta.lab.commands.bench:bench",
        "report": "remtta.lab.commands.report:report",
        "score": "remtta.lab.commands.score:score",
    },
}
"""The extensions of remtta itself. Those of methods are tables of `remtta.methods.settings.core.MethodSpec` by name."""


@dataclass(frozen=True)
class Extension:
    """A name, and the object that it stands for."""

    name: str
    target: str  # "module:object"
    entry: EntryPoint | None = None  # of another package; None for remtta's own

    @property
    def module(self) -> str:
        """The module of the object."""
        return self.target.partition(":")[0]

    @property
    def owner(self) -> str:
        """The package that has it, for messages."""
        if self.entry is None:
            return "remtta itself"
        return f"the package {self.entry.dist.name if self.entry.dist else self.entry.module}"

    @property
    def summary(self) -> str:
        """A one-line description of another package's extension, from the metadata of the package."""
        if self.entry is None or self.entry.dist is None:
            return ""
        metadata = self.entry.dist.metadata
        text = metadata["Summary"] if "Summary" in metadata else ""  # noqa: SIM401 - a Message, whose get is untyped
        return f"{text} ({self.owner.removeprefix('the ')})".lstrip()

    def take_names(self, options: set[str], taken: set[str]) -> None:
        """Add the names of its options to those taken; raise UsageError if one of another package's is taken."""
        if self.entry and (both := sorted(options & taken)):
            raise UsageError(
                f"{self.target} of {self.owner} has options that exist already: {', '.join(both)}; uninstall it"
            )
        taken |= options

    def load(self) -> object:
        """Import and return the object; raise UsageError, naming the package, if another package's cannot be."""
        module, _, name = self.target.partition(":")
        if self.entry is None:
            return getattr(import_module(module), name)
        try:
            return self.entry.load()
        except Exception as error:  # a foreign module may raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise UsageError(
                f"{self.target} of {self.owner} cannot be imported ({problem}); fix or uninstall it"
            ) from error


def built_in(point: Point) -> dict[str, Extension]:
    """Return remtta's own extensions at a point by name, in the order of its table, without those of missing parts."""
    return {name: Extension(name, target) for name, target in _BUILT_IN[point].items() if _exists(target)}


def missing(point: Point) -> dict[str, str]:
    """Return remtta's own extensions at a point that are in missing parts, with the name of the part."""
    return {name: _part_of(target) for name, target in _BUILT_IN[point].items() if not _exists(target)}


def of_packages(point: Point, known: Iterable[str]) -> tuple[dict[str, Extension], dict[str, str]]:
    """Return the extensions of other packages by name, and the names that are refused, with the reason.

    Args:
        known: The names that are taken by remtta itself.
    """
    found: dict[str, Extension] = {}
    refused: dict[str, str] = {}
    owners, kind = dict.fromkeys(known, "remtta itself"), point.removesuffix("s")
    for entry in _entry_points(f"remtta.{point}"):
        extension = Extension(entry.name, entry.value, entry)
        name, owner = entry.name, extension.owner
        if name in owners:
            both = f"{owners[name]} and {owner} both have a {kind} {name}"
            refused[name] = f"{both}; uninstall {owner.removeprefix('the package ')}"
        elif not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            refused[name] = f"{owner} has a {kind} {name}, whose name may only have letters, digits, - and _"
        else:
            found[name], owners[name] = extension, owner
    return found, refused


def usable(point: Point, make: Callable[[Extension], T], known: Iterable[str] = ()) -> tuple[dict[str, T], list[str]]:
    """Return what is made of each extension at a point by name, remtta's own first, and why others cannot be used.

    Args:
        make: Loads an extension; what it raises for one of another package leaves that one out.
        known: Further names that are taken by remtta itself.
    """
    own = built_in(point)
    others, refused = of_packages(point, [*known, *own])
    made, reasons = {name: make(extension) for name, extension in own.items()}, list(refused.values())
    for name, extension in others.items():
        try:
            made[name] = make(extension)
        except UsageError as error:
            reasons.append(str(error))
        except Exception as error:  # a foreign object may be anything
            what = f"{extension.target} of {extension.owner} is not a {point.removesuffix('s')}"
            reasons.append(f"{what} ({type(error).__name__}: {error}); uninstall it")
    return made, reasons


def load_of_part(target: str, what: str) -> Any:
    """Import and return an object of one of remtta's parts, `module:object`; raise UsageError, beginning with what
    needs it, if the part is not installed.
    """
    if not _exists(target):
        raise UsageError(f"{what} needs remtta.{_part_of(target)}, a part of remtta that is not installed")
    return Extension("", target).load()


def has_part(part: str) -> bool:
    """Return whether a part of remtta is installed."""
    return importlib.util.find_spec(f"remtta.{part}") is not None


def _exists(target: str) -> bool:
    """Return whether the part of remtta that has an extension is installed."""
    part = _part_of(target)
    return part not in PARTS or has_part(part)


def _part_of(target: str) -> str:
    """Return the package below `remtta` of an object, `module:object`."""
    return target.partition(":")[0].split(".")[1]


def _entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of all installed packages in a group, sorted by name."""
    if not any(map(_has_extension, sys.path)):
        return []
    from importlib.metadata import entry_points  # takes a tenth of the time of `remtta --help`

    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.dist.name if entry.dist else ""))


def _has_extension(folder: str) -> bool:
    """Return whether a package in a folder of Python's path has an extension; a folder is read again if it changed."""
    try:
        return _reads_extension(folder, Path(folder).stat().st_mtime_ns)
    except OSError:  # not there
        return False


@functools.cache
def _reads_extension(folder: str, modified: int) -> bool:
    for path in Path(folder).glob("*-info/entry_points.txt"):
        with contextlib.suppress(OSError):  # an unreadable file of another package; importlib skips it, too
            if "[remtta." in path.read_text("utf-8", "replace"):
                return True
    return False
