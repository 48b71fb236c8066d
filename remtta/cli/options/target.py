"""The one file that a command writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from remtta.errors import UsageError


@dataclass(frozen=True)
class TargetOptions:
    """The file to write."""

    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")]
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False

    def check(self) -> None:
        """Refuse a file of another kind, and one that is there."""
        if self.output.suffix != ".safetensors":
            raise UsageError(f"--output {self.output} must end in .safetensors")
        if not self.output.parent.is_dir():
            raise UsageError(f"--output: {self.output.parent}: no such folder; make it first")
        if self.output.exists() and not self.overwrite:
            raise UsageError(f"{self.output} exists; choose another --output or add --overwrite")
