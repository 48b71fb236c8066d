"""The export formats by name; an export's files appear all together or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from remtta.errors import OutputError, UsageError, needed
from remtta.export.adapted import ExportableModel
from remtta.export.onnx_models import FILE, write_onnx
from remtta.export.peft_adapters import write_peft
from remtta.export.timm_folders import write_timm
from remtta.files import FolderLock, check_can_hold, check_not_input, writing

Format = Literal["onnx", "peft", "timm"]

_Write = Callable[[ExportableModel, Path], None]
_WRITERS: Mapping[Format, _Write] = {"onnx": write_onnx, "peft": write_peft, "timm": write_timm}
_PACKAGES: Mapping[Format, Sequence[str]] = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "peft": ("peft",)}
_MAIN: Mapping[Format, str] = {"onnx": FILE, "peft": "adapter_config.json", "timm": "config.json"}


def export(adapted: ExportableModel, form: Format, output: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the adapted model to a folder in a format, and verify it there; return the files. Raise UsageError if a
    package is missing, files exist already or are those of the model or the delta, another process writes to the
    folder, or the format cannot hold the model; OutputError if a file cannot be written; RemttaError if the export
    fails, or its logits differ from the model's.
    """
    for package in _PACKAGES.get(form, ()):
        needed(package, "export", "an export")
    check_can_hold(output, "the folder of an export", "--output")
    if not overwrite and (output / _MAIN[form]).exists():  # before the work; any other file is noticed after it
        raise UsageError(f"{output / _MAIN[form]} exists; choose another --output or add --overwrite")
    with writing(output), _place(output) as place:
        try:
            _WRITERS[form](adapted, place)
        except SafetensorError as error:  # what safetensors raises on a full disk
            raise OutputError(f"{output} cannot be written: {error}") from error
        made = sorted(place.iterdir())
        for path in made:  # safetensors makes files that only their owner can read
            shutil.copymode(place / _MAIN[form], path)
        taken = [output / path.name for path in made if (output / path.name).exists()]
        if taken and not overwrite:
            raise UsageError(f"{taken[0]} exists; choose another --output or add --overwrite")
        for path in taken:
            check_not_input(path, "--output", adapted.inputs)
        for path in taken:  # all first, so that a kill leaves no mix of new and old files
            path.unlink()
        for path in made:
            os.replace(path, output / path.name)
    return [output / path.name for path in made]


@contextlib.contextmanager
def _place(output: Path) -> Iterator[Path]:
    """Create an empty hidden folder to write to, in place of what a killed export left."""
    lock, place = FolderLock(output), output / ".export"
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        lock.release()
