"""Exit with 1 if a health file of `remtta adapt` reports an error, or is older than a number of seconds."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path


def trouble(file: Path, max_s: float) -> str | None:
    """Return the problem of the run that writes this file, if there is one."""
    try:
        health = json.loads(file.read_text())
        age_s = (datetime.now(UTC) - datetime.fromisoformat(health["time"])).total_seconds()
    except (OSError, ValueError, KeyError) as error:
        return f"no health file: {error}"
    if age_s > max_s:
        return f"silent for {age_s:.0f} s"
    return str(health.get("reason", "failed")) if health.get("state") == "error" else None


if __name__ == "__main__":
    sys.exit(trouble(Path(sys.argv[1]), float(sys.argv[2])))
