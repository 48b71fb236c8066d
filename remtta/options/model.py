"""Options of a classifier: its weights and preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from remtta.errors import UsageError
from remtta.files import as_path
from remtta.options.loaders import Loader, find_loaders, is_model_file, loader_of, own_options
from remtta.options.option import PassedSettings, model_option

DEFAULT_MODEL = "vit_base_patch16_224"
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".tar", ".bin", ".npz")

_CHECKPOINTS = "the checkpoint's"


def _names() -> str:
    """Return the help of --model: what the loaders take."""
    *others, timm = [loader.names for loader in find_loaders().values()]
    names = [timm, *others]
    return f"{', '.join(names[:-1])}{' or ' * bool(others)}{names[-1]}."


@dataclass(frozen=True)
class ModelOptions:
    """Options of `load_model`; None or empty values are unset."""

    name: Annotated[
        str | None,
        model_option(
            _names, flags=("--model", "-m"), default=f"the delta's, or {DEFAULT_MODEL}", common=True, more="models.md"
        ),
    ] = None
    checkpoint: Annotated[
        Path | str | None,
        model_option(
            "Weights: .safetensors, .pth/.pt/.tar (weights only, never run as code) or .npz.",
            default="the delta's, or timm's own",
            common=True,
            more="models.md#weights-from-elsewhere",
        ),
    ] = None
    use_ema: Annotated[bool, model_option("Use the averaged weights (EMA) of a timm training checkpoint.")] = False
    num_classes: Annotated[
        int | None,
        model_option("Number of classes of the checkpoint's head.", min=2, default="the model's", common=True),
    ] = None
    model_kwargs: Annotated[
        Mapping[str, Any], model_option("More arguments for timm.create_model.", metavar="KEY=VALUE ...", common=True)
    ] = field(default_factory=dict)
    labels: Annotated[
        Path | Sequence[str] | None,
        model_option("Class names, one per line.", metavar="FILE", default="the model's", common=True),
    ] = None
    mean: Annotated[
        tuple[float, float, float] | None,
        model_option(
            "Pixel mean in [0, 1] per channel; one number for all.", metavar="R G B", default=_CHECKPOINTS, common=True
        ),
    ] = None
    std: Annotated[
        tuple[float, float, float] | None,
        model_option(
            "Pixel standard deviation in [0, 1] per channel; one number for all.",
            metavar="R G B",
            default=_CHECKPOINTS,
            common=True,
        ),
    ] = None
    input_size: Annotated[
        tuple[int, int] | None,
        model_option("Input height and width in pixels; one for both.", metavar="H W", default="the model's"),
    ] = None
    interpolation: Annotated[
        str | None, model_option("Resize filter: bilinear, bicubic, ...", default=_CHECKPOINTS)
    ] = None
    crop_pct: Annotated[
        float | None,
        model_option("Fraction of the short side that the center crop keeps.", default=_CHECKPOINTS, common=True),
    ] = None
    own: Annotated[Mapping[str, Any], PassedSettings(own_options)] = field(default_factory=dict)
    """Options that only some loaders have, by name."""

    def __post_init__(self) -> None:
        if is_model_file(str(self.name)) and self.checkpoint is None:
            object.__setattr__(self, "checkpoint", self.name)
            object.__setattr__(self, "name", Path(str(self.name)).name)
        named, given = str(self.name), str(self.checkpoint)
        both = is_model_file(named) and Path(named).name != Path(given).name  # records have the name and the whole path
        if both or is_model_file(named) != is_model_file(given):
            whole = self.checkpoint if is_model_file(str(self.checkpoint)) else self.name
            raise UsageError(f"{whole} is a whole model: name it with --model, and leave --checkpoint out")

    @classmethod
    def from_arguments(cls, **arguments: Any) -> ModelOptions:
        """Return options by their names, those of loaders among them; raise TypeError if there is no such option."""
        shared = {each.name for each in fields(cls)} - {"own"}
        own = {name: value for name, value in arguments.items() if name not in shared}
        if strange := own.keys() - {each.name for each in fields(own_options())}:
            raise TypeError(f"a model has no option {', '.join(sorted(strange))}")
        given = {name: value for name, value in own.items() if value is not None}
        return cls(**{name: arguments[name] for name in shared & arguments.keys()}, own=given)

    @property
    def loader(self) -> Loader:
        """The loader that takes the model."""
        return loader_of(self)

    @property
    def weights_place(self) -> Path | None:
        """The checkpoint, or else the local folder that may be in the name; None without either."""
        local = self.checkpoint or (self.name or "").partition(":")[2]
        return Path(local) if local else None

    @property
    def files(self) -> list[Path]:
        """The local files and folders that the model is made of: weights, and files of its loader's own options."""
        own = [Path(value) for value in self.own.values() if isinstance(value, str | Path) and Path(value).exists()]
        return [*([self.weights_place] if self.weights_place else []), *own]

    def check(self) -> None:
        """Raise UsageError if the checkpoint does not exist, or the loader lacks a package or has no such options."""
        if self.checkpoint is not None and not (path := as_path(self.checkpoint, "checkpoint")).is_file():
            kind = "model" if is_model_file(str(path)) else "checkpoint"
            what = "a folder; name the file in it" if path.is_dir() else f"no such {kind} file"
            raise UsageError(f"{self.checkpoint}: {what}")
        if self.name is not None:  # else the model is a delta's
            self.loader.check(self)
