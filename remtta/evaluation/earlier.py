"""The evaluation that a folder already holds: whether this one may go on with it, and from where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remtta.errors import UsageError
from remtta.evaluation.domains import title_of
from remtta.evaluation.progress import Progress
from remtta.runs.folder import EVENTS, PREDICTIONS, check_same_settings
from remtta.runs.reading import read_record, read_rows


def read_earlier(record: Path) -> dict[str, Any]:
    """The results, so far, of an evaluation.

    Args:
        record: Its `results.json`.

    Raises:
        RemttaError: If it cannot be read.
        UsageError: If it is no record of an evaluation.
    """
    earlier = read_record(record)
    settings = earlier.get("settings")
    if "status" not in earlier or not isinstance(settings, Mapping) or not isinstance(settings.get("methods"), Mapping):
        raise UsageError(f"{record} is damaged (it is no record of an evaluation); start again with --overwrite")
    return earlier


def run_order(folder: Path, earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Methods in the order in which they are run: those that the evaluation began with, then the new ones.

    Args:
        folder: Where it is.
        earlier: The settings that it began with.
        settings: Those of now, which may have more methods.

    Raises:
        UsageError: If a method is left out, or another setting changed.
    """
    begun, now = list(earlier["methods"]), json.loads(json.dumps(settings))
    left_out = [name for name in begun if name not in now["methods"]]
    if left_out:
        raise UsageError(
            f"the evaluation in {folder} has {', '.join(left_out)}, too, and --resume keeps all of its methods: "
            f"add {'it' if len(left_out) == 1 else 'them'} to --methods, or choose another --output"
        )
    try:
        check_same_settings(_comparable(earlier, begun), _comparable(now, begun))
    except UsageError as error:
        raise UsageError(f"{error}; give that again, or choose another --output") from None
    return [*begun, *(name for name in now["methods"] if name not in begun)]


def _comparable(settings: Mapping[str, Any], methods: list[str]) -> dict[str, Any]:
    """Settings of these methods alone, in which what is there or not is told in a few words."""
    data, start = settings["data"], settings.get("start_delta")
    told = {
        title_of(
            domain["name"], domain["severity"]
        ): f"{domain['images']} images, labels {domain['labels_sha256'][:16]}"
        for domain in data["domains"]
    }
    return {
        **settings,
        "data": {**data, "domains": told},
        "methods": {name: settings["methods"][name] for name in methods},
        "start_delta": start and f"{start['method']}, {start['frames']} frames, {str(start['file_sha256'])[:16]}",
        "source_statistics": _of(settings.get("source_statistics", {}), methods),
    }


def _of(statistics: Mapping[str, Mapping[str, Any]], methods: list[str]) -> dict[str, str]:
    return {name: statistics[name]["file_sha256"][:32] for name in methods if name in statistics}


def progress_of_completed(folder: Path, earlier: Mapping[str, Any]) -> Progress:
    """How far an evaluation that is complete has come, so that methods can be added to it.

    Raises:
        UsageError: If it lacks some of its rows, or has others.
    """
    finished = [seed for content in earlier["methods"].values() for seed in content["seeds"].values()]
    rows, events = folder / PREDICTIONS, folder / EVENTS
    counts = Counter((row["method"], row["seed"]) for row in read_rows(rows)) if rows.exists() else Counter()
    if counts != {(run["method"], run["seed"]): run["images"] + run["skipped"] for run in finished}:
        raise UsageError(f"{rows} does not hold the rows of the evaluation any more; start again with --overwrite")
    return Progress(
        finished=finished,
        num_bytes=rows.stat().st_size,
        event_bytes=events.stat().st_size if events.exists() else 0,
    )
