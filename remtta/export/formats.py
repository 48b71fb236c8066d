"""The formats by name, and the folder that an export leaves: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from remtta.errors import UsageError
from remtta.export.adapted import AdaptedModel
from remtta.files import FolderLock, check_can_hold, writing

Format = Literal["onnx", "peft", "timm"]


def export(
    adapted: AdaptedModel, form: Format, output: Path, *, onto: Path | None = None, overwrite: bool = False
) -> list[Path]:
    """Write the adapted model in a format, and check it there.

    Args:
        adapted: The model.
        form: The format.
        output: The folder.
        onto: For ONNX: a file of the same base whose norms are replaced.
        overwrite: Replace files of the same names.

    Returns:
        The files.

    Raises:
        UsageError: If a package is missing, files are there already, another process writes to the folder, or the
            format cannot hold the model.
        DeltaError: If `onto` is of other weights.
        OutputError: If the disk refuses.
        RemttaError: If the export fails, or answers otherwise than the model.
    """
    check_can_hold(output, "the folder of an export", "--output")
    write = _writer(form, onto)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    with writing(output), _place(output) as place:
        _write(write, adapted, place)
        made = sorted(place.iterdir())
        taken = [output / path.name for path in made if (output / path.name).exists()]
        if taken and not overwrite:
            raise UsageError(f"{taken[0]} exists; choose another --output or add --overwrite")
        for path in taken:  # all of them first: a kill leaves no new file beside an old one
            path.unlink()
        for path in made:
            os.replace(path, output / path.name)
    return [output / path.name for path in made]


@contextlib.contextmanager
def _place(output: Path) -> Iterator[Path]:
    """A hidden folder to write to; what an export that was killed left there is gone."""
    lock, place = FolderLock(output), output / ".export"
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        lock.release()


def _write(write: Callable[[AdaptedModel, Path], None], adapted: AdaptedModel, folder: Path) -> None:
    """Have a library write; of a full disk some tell by errors of their own."""
    try:
        write(adapted, folder)
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        if full in str(error):
            raise OSError(errno.ENOSPC, full) from error
        raise


def _writer(form: Format, onto: Path | None) -> partial[None]:
    """What writes a format; imported when used."""
    assert form in get_args(Format)
    if form == "onnx":
        from remtta.export.onnx_models import write_onnx

        return partial(write_onnx, onto=onto)
    if form == "peft":
        from remtta.export.peft_adapters import write_peft

        return partial(write_peft)
    from remtta.export.timm_folders import write_timm

    return partial(write_timm)
