"""Where a delta comes from: the run that made it, what that saw, and the deltas it builds on; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TEXTS = ("made_by", "run", "source", "kind", "started")
_PARENT = {"file_sha256": str, "method": str, "frames": int, "updates": int, "created": str}


def parsed_lineage(text: str) -> dict[str, Any]:
    """The lineage in a delta's header.

    Raises:
        ValueError: If it is none.
    """
    lineage = json.loads(text)
    if not isinstance(lineage, dict) or not isinstance(lineage.get("parents", []), list):
        raise ValueError("its lineage is none")
    texts = all(isinstance(lineage.get(name, ""), str) for name in _TEXTS)
    if not texts or not all(map(_is_parent, lineage.get("parents", []))):
        raise ValueError("its lineage is none")
    return lineage


def _is_parent(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(content.get(name), kind) for name, kind in _PARENT.items())
        and all(isinstance(content.get(name, ""), str) for name in _TEXTS)
    )
