"""Summarise a run or an evaluation in a few named lines, for `remtta inspect` and the page; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remtta.errors import counted
from remtta.runs.reading import shown_estimates

Facts = dict[str, str]


def state_of(reported: str, alive: bool | None, end: str = "killed") -> str:
    """Return a run's state; if it says "running" but no process is writing to it, say that it was interrupted."""
    return f"was {end}; --resume continues it" if reported == "running" and alive is False else reported


def run_facts(content: Mapping[str, Any]) -> Facts:
    """Return the facts of a run, from `describe_folder`."""
    run = content["run"]
    counts, timing, model, method = run["counts"], run["timing"], run["model"], run["method"]
    learns = bool(run.get("adapted", True) or counts["updates"])
    facts = {
        "run": f"{state_of(run['exit_reason'], content['alive'])}; started {timing['started']}, {timing['seconds']} s, "
        f"{timing['images_per_s']} images/s on {run['environment']['device']}",
        "source": f"{run['source']['name']} ({run['source']['kind']})",
        "model": f"{model.get('name') or 'unknown'}, {model['num_classes']} classes, base {model['base_sha256'][:12]}",
        "method": f"{method['name']}, batch {method['batch_size']}{_settings(method) if learns else ''}",
        "frames": f"{counts['frames']}, {counts['skipped']} skipped; "
        f"{counted(counts['updates'], 'update')}{_more(counts)}",
        "guard": _guard(run.get("guard"), run.get("options")) if learns else "none",
    }
    if estimates := (run.get("accuracy") or {}).get("last"):
        facts["accuracy"] = f"of the last frames, estimated: {shown_estimates(estimates)}"
    if "predictions" not in content:
        return facts
    facts |= _prediction_facts(content["predictions"])
    if run["exit_reason"] != "running" and content["predictions"]["predicted"] != counts["frames"] - counts["skipped"]:
        facts["predictions"] += f"; run.json counts {counts['frames'] - counts['skipped']}, so rows were lost or added"
    return facts


def _guard(guard: dict[str, Any] | None, options: Any) -> str:
    if guard is None:
        return "none; the adapted model answers"
    ended = "; adaptation has ended" if guard.get("retired") else ""
    both = guard.get("answered_by_both", 0)
    shared = f", {both} by both models" if both else ""
    requested = (options or {}).get("guard") or {}
    kinds = [f"{name} {requested[name]}" for name in ("action", "answer") if name in requested]
    alarms, by_source = guard.get("alarms", 0), guard.get("answered_by_source", 0)
    source = f"{counted(by_source, 'frame')} answered by the source{shared}{ended}"
    lead = [f"lead {100 * guard['lead']:+.0f} %"] if guard.get("lead") else []
    return ", ".join([*kinds, *lead, counted(alarms, "alarm"), source])


def _more(counts: dict[str, int]) -> str:
    """Return the counts that are usually 0."""
    texts = {"not_adapted": "only predicted", "dropped": "dropped for newer ones", "gaps": "gaps"}
    return "".join(f"; {counts[name]} {text}" for name, text in texts.items() if counts.get(name))


def _settings(method: dict[str, Any]) -> str:
    settings = [f"lr {method['lr']:g} ({method.get('optimizer')})"] if method.get("lr") is not None else []
    if method.get("mask_ratios") is not None:
        settings.append(f"mask ratios {' '.join(f'{ratio:g}' for ratio in method['mask_ratios'])}")
    if method.get("ranking_weight") is not None:
        settings.append(f"lambda {method['ranking_weight']:g}")
    if method.get("anchor"):
        settings.append(f"anchor {method['anchor']:.3g}")
    return "".join(f", {setting}" for setting in settings)


def _prediction_facts(predictions: dict[str, Any]) -> Facts:
    if not predictions["predicted"]:
        return {"predictions": "none"}
    common = [f"{entry['label'] or entry['class']} ({entry['frames']})" for entry in predictions["most_common"]]
    return {
        "predictions": f"{predictions['predicted']}, mean entropy {predictions['mean_entropy']:.3f} nats, "
        f"{predictions['classes_predicted']} classes",
        "most common": "; ".join(common),
    }


def evaluation_facts(content: Mapping[str, Any]) -> Facts:
    """Return the facts of an evaluation, from `describe_folder`."""
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
