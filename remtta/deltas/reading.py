"""What a delta's file says, and whether it is whole; imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from remtta.deltas.lineage import parsed_lineage
from remtta.errors import DeltaError, UsageError
from remtta.models.hashing import parts_sha256

FORMAT_VERSION = "1"
CHECKSUM = "content_sha256"
"""Header entry with a hash over the tensors and the header's other entries."""

UNREADABLE = (SafetensorError, OSError, ValueError)
"""What reading raises of a file that is damaged, or none of these."""

_MOST_HEADER_BYTES = 8 * 1024**2  # a hundred times that of a large model's
_REQUIRED = ("format_version", "remtta_version", "model", "base_sha256", "method", "frames", "updates", "created")


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`arrays_of` a file.

    Raises:
        DeltaError, UsageError: As `arrays_of` and `read_content`.
    """
    return arrays_of(read_content(path), path)


def read_content(path: Path) -> bytes:
    """The bytes of a delta's file.

    Raises:
        DeltaError: If it cannot be read, or starts as no safetensors file does.
        UsageError: If there is no such file.
    """
    with delta_errors(path):
        check_header_size(path)
        return path.read_bytes()


def arrays_of(content: bytes, path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A delta's fields but its tensors, and these as arrays by name, all finite.

    Args:
        content: A delta file's bytes.
        path: What errors call it.

    Raises:
        DeltaError: If it is no safetensors file, lacks a header field, or holds a value that is not finite.
    """
    with delta_errors(path):
        _check_header_size(content[:8])
        try:
            arrays = load(content)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"it holds numbers of a kind that no delta has ({error})") from error
        # What `load` took has a header of JSON after its length.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
        parts = (
            (name, f"torch.{arrays[name].dtype}", arrays[name].shape, _bytes(arrays[name])) for name in sorted(arrays)
        )
        check_content(header, parts_sha256(parts))
    fields = delta_fields(path, header)
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise DeltaError(f"the delta's {name} holds values that are not finite numbers")
    return fields, arrays


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def delta_errors(path: str | Path) -> Iterator[None]:
    """Tell what reading a delta's file raises.

    Raises:
        UsageError, DeltaError: In place of `UNREADABLE`.
    """
    try:
        yield
    except FileNotFoundError as error:
        deltas = Path(path).parent / "deltas"
        hint = f"; the deltas of an evaluation are in {deltas}" if deltas.is_dir() else ""
        raise UsageError(f"{path}: no such delta file{hint}") from error
    except UNREADABLE as error:
        raise DeltaError(f"{path} is not a readable safetensors file: {error}") from error


def delta_fields(path: str | Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a `Delta` but its tensors, from a file's header.

    Raises:
        DeltaError: If one is missing or damaged.
    """
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise DeltaError(f"{path} is not a remtta delta: its header lacks {', '.join(missing)}")
    if header["format_version"] != FORMAT_VERSION:
        raise DeltaError(
            f"{path} has delta format {header['format_version']}, this remtta reads {FORMAT_VERSION}; update remtta"
        )
    try:
        return {
            **{name: header[name] for name in ("model", "base_sha256", "method", "created", "remtta_version")},
            **{name: int(header[name]) for name in ("frames", "updates")},
            **{
                name: _mapping(header.get(name, "{}")) for name in ("hyperparameters", "model_options", "preprocessing")
            },
            "lineage": parsed_lineage(header.get("lineage", "{}")),
        }
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"{path} has a damaged header: {error}") from error


def _mapping(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {text[:40]}")
    return content


def check_header_size(path: str | Path) -> None:
    """Refuse a file whose header would take longer to read than any model's.

    Raises:
        OSError, ValueError: Two of `UNREADABLE`.
    """
    with open(path, "rb") as content:
        _check_header_size(content.read(8))


def _check_header_size(start: bytes) -> None:
    if int.from_bytes(start, "little") > _MOST_HEADER_BYTES:
        raise ValueError("its header is longer than that of any model")


def check_content(header: Mapping[str, str], tensors_sha256: str) -> None:
    """Refuse tensors that are not those its checksum was made of, where a header has one.

    Raises:
        ValueError: One of `UNREADABLE`.
    """
    if CHECKSUM in header and header[CHECKSUM] != content_sha256(header, tensors_sha256):
        raise ValueError("its content does not match its checksum")


def content_sha256(header: Mapping[str, str], tensors_sha256: str) -> str:
    """A checksum over tensors, by their hash, and the header's other entries."""
    digest = hashlib.sha256(tensors_sha256.encode())
    for name in sorted(header.keys() - {CHECKSUM}):
        digest.update(f"\n{len(name)} {name} {header[name]}".encode())
    return digest.hexdigest()
