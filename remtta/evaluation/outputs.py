"""The files with which an evaluation ends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from remtta.evaluation.by_class import write_confusion
from remtta.evaluation.results import Tallies
from remtta.evaluation.tables import csv_table, latex_table, markdown_table
from remtta.files import write_atomically, write_json, writing
from remtta.runs.folder import RESULTS

TABLE = "table.md"
CONFUSION = "confusion"

_TABLES = {TABLE: markdown_table, "table.tex": latex_table, "table.csv": csv_table}
TABLES = tuple(_TABLES)


def write_results(folder: Path, content: dict[str, Any], tallies: Tallies, names: Mapping[int, str]) -> None:
    """Write the tables, a confusion matrix per method, and at last `results.json`, which says that all is there.

    Args:
        folder: The evaluation's.
        content: What its `results.json` is to hold.
        tallies: Outcomes of all runs.
        names: Of the classes, by number, where they have any.

    Raises:
        OutputError: If the disk refuses.
    """
    with writing(folder):
        (folder / CONFUSION).mkdir(exist_ok=True)
    for method in content["methods"]:
        learned = (phases["adapt"] for (name, _), phases in tallies.items() if name == method)
        own = (tally for places in learned for tally in places.values())
        write_confusion(folder / CONFUSION / f"{method}.csv", own, names)
    for name, table in _TABLES.items():
        write_atomically(folder / name, partial(Path.write_text, data=table(content), encoding="utf-8"))
    write_json(folder / RESULTS, content)
