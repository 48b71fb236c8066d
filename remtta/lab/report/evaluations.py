"""Describe the folder of an evaluation, for `remtta inspect` and the report."""

from __future__ import annotations

from pathlib import Path

from remtta.errors import counted
from remtta.files import is_locked
from remtta.lab.tables import table_rows
from remtta.runs.folder import RESULTS
from remtta.runs.inspection import Content, Facts, Inspection, fact_lines, read_content, state_of
from remtta.runs.reading import aligned

_RESULT = ("mean", "error", "ece", "mean_std", "gain", "gain_se")


def inspect_evaluation(folder: Path) -> Inspection:
    """Describe the folder of an evaluation; use it within `reading`. Raise RemttaError if its record cannot be read."""
    content = describe_evaluation(folder)
    lines, evaluation = [*fact_lines(evaluation_facts(content)), ""], content["evaluation"]
    if evaluation["methods"]:
        header, rows = table_rows(evaluation, ("mean", "gain", "ece"))
        lines += aligned([header, *rows])
    return Inspection(content, lines)


def describe_evaluation(folder: Path) -> Content:
    """Return an evaluation's status and settings, and the results of each method if it is complete."""
    record = read_content(folder / RESULTS)
    methods = record.get("methods") or {}
    results = {name: {field: result.get(field) for field in _RESULT} for name, result in methods.items()}
    evaluation = {"status": record["status"], "settings": record["settings"], "methods": results}
    return {"evaluation": evaluation, "alive": is_locked(folder)}


def evaluation_facts(content: Content) -> Facts:
    """Return the facts of an evaluation, from `describe_evaluation`."""
    evaluation = content["evaluation"]
    settings = evaluation["settings"]
    data, model, options = settings["data"], settings["model"], settings["options"]
    state, seeds = state_of(evaluation["status"], content["alive"], "stopped"), ",".join(map(str, options["seeds"]))
    device = f" on {settings['device']}" if settings.get("device") else ""
    return {
        "evaluation": f"{state}; {options['scenario']}, batch {options['batch_size']}, seeds {seeds}{device}",
        "data": f"{data['root']} ({data['layout']}), {counted(len(data['domains']), 'domain')}",
        "model": f"{model.get('name') or 'unknown'}, base {model['base_sha256'][:12]}",
        "methods": ", ".join(settings["methods"]) + ("" if evaluation["methods"] else "; no results yet"),
    }
