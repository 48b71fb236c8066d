"""From prediction rows and run records to `results.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from remtta.evaluation.by_class import class_errors
from remtta.evaluation.metrics import TOP, Tally, harmonic_mean, mean_and_std
from remtta.evaluation.uncertainty import Outcomes, paired_standard_error, standard_error
from remtta.runs.reading import Row, read_rows

DELTAS = "deltas"
PLOTS = "plots"

_ROWS_AT_ONCE = 4000

Place = tuple[str, int | None]
"""A domain's name and severity."""

Tallies = dict[tuple[str, int], dict[str, dict[Place, Tally]]]
"""By method and seed, then phase, then domain and severity."""


def delta_path(folder: Path, method: str, seed: int | str) -> Path:
    """Where an evaluation keeps a run's delta."""
    return folder / DELTAS / f"{method}_seed{seed}.safetensors"


def tally_rows(path: Path) -> Tallies:
    """Outcomes by method, seed, phase, domain and severity, in memory that does not grow with rows."""
    tallies: Tallies = {}
    numbers: dict[str, int] = {}
    rows = (row for row in read_rows(path) if "error" not in row)
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        apart: dict[tuple[Any, ...], list[Row]] = {}
        for row in chunk:
            apart.setdefault((row["method"], row["seed"], row["phase"], row["domain"], row.get("severity")), []).append(
                row
            )
        for (method, seed, phase, *place), own in apart.items():
            places = tallies.setdefault((method, seed), {}).setdefault(phase, {})
            places[tuple(place)] = places.get(tuple(place), Tally()) + Tally.of(own, numbers)
    if not numbers:
        for tally in (tally for phases in tallies.values() for places in phases.values() for tally in places.values()):
            tally.start_at_first()
    return tallies


def errors_by_round(path: Path, num_domains: int) -> dict[str, list[float]]:
    """Error in percent of each method in each round through all its domains, over all images and seeds."""
    asked: dict[str, Counter[int]] = {}
    wrong: dict[str, Counter[int]] = {}
    for row in read_rows(path):
        if "error" not in row and row["phase"] == "adapt":
            number = row["visit"] // num_domains
            asked.setdefault(row["method"], Counter())[number] += 1
            wrong.setdefault(row["method"], Counter())[number] += row["class"] != row["label_true"]
    return {
        method: [100 * wrong[method][number] / rounds[number] for number in sorted(rounds)]
        for method, rounds in asked.items()
    }


def summarise(
    tallies: Tallies, runs: Sequence[Mapping[str, Any]], order: Sequence[str], num_classes: int
) -> dict[str, Any]:
    """The `methods` part of `results.json`.

    Args:
        tallies: Outcomes of all runs.
        runs: A record per run, with its method and seed, in the order of the table.
        order: Names of the domains, in the order of the table.
        num_classes: Classes of the model; five of so few or less are no feat.

    Returns:
        For each method the means over seeds, their standard deviations and
        standard errors, and the numbers of each seed.
    """
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_method.setdefault(run["method"], []).append(run)
    phases = {
        name: [_in_order(tallies.get((name, run["seed"]), {}), order) for run in own] for name, own in by_method.items()
    }
    methods = {}
    for name, own in by_method.items():
        severities = [tallies.get((name, run["seed"]), {}).get("adapt", {}) for run in own]
        seeds = [
            {**run, **_one_seed(by_phase, places, num_classes > TOP)}
            for run, by_phase, places in zip(own, phases[name], severities, strict=True)
        ]
        methods[name] = _over_seeds(seeds) | _standard_errors(phases[name])
        methods[name]["class_error"] = class_errors(tally for run in phases[name] for tally in run["adapt"].values())
    _compare(methods, {name: [run["adapt"] for run in own] for name, own in phases.items()})
    return {name: _seeds_last(content) for name, content in methods.items()}


def _in_order(phases: Mapping[str, Mapping[Place, Tally]], order: Sequence[str]) -> dict[str, Outcomes]:
    """Outcomes by phase and domain: the severities of each domain together."""
    return {phase: _by_domain(phases.get(phase, {}), order) for phase in dict.fromkeys(("adapt", *phases))}


def _by_domain(tallies: Mapping[Place, Tally], order: Sequence[str]) -> dict[str, Tally]:
    """The severities of each domain together, in order."""
    together: dict[str, Tally] = {}
    for (name, _), tally in tallies.items():
        together[name] = together.get(name, Tally()) + tally
    return {name: together[name] for name in order if name in together}


def _one_seed(phases: Mapping[str, Outcomes], severities: Mapping[Place, Tally], ranked: bool) -> dict[str, Any]:
    adapted = phases["adapt"]
    errors = {domain: tally.error for domain, tally in adapted.items()}
    together = sum(adapted.values(), Tally()).summary()
    content: dict[str, Any] = {
        "error": errors,
        "mean": mean_and_std(list(errors.values()))[0],
        "domains": {domain: tally.summary() for domain, tally in adapted.items()},
        "error_by_severity": {
            f"{name}{severity}": tally.error for (name, severity), tally in severities.items() if severity is not None
        },
        **{name: value for name, value in together.items() if name not in ("error", "top5_error", "images")},
    }
    if ranked and "top5_error" in together:
        content["top5_error"] = {domain: summary["top5_error"] for domain, summary in content["domains"].items()}
        content["top5"] = mean_and_std(list(content["top5_error"].values()))[0]
    for phase in ("unseen", "revisit"):
        if phase in phases:
            again = {domain: tally.error for domain, tally in phases[phase].items()}
            content[phase] = {"error": again, "mean": mean_and_std(list(again.values()))[0]}
    if "unseen" in content:
        content["unseen"]["harmonic_mean"] = harmonic_mean(content["mean"], content["unseen"]["mean"])
    return content


_AVERAGED = ("mean", "top5", "ece", "diversity", "tvd")


def _over_seeds(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = seeds[0]
    content: dict[str, Any] = _by_domain_over_seeds(seeds, "error")
    if all("top5_error" in seed for seed in seeds):
        content["top5_error"] = _by_domain_over_seeds(seeds, "top5_error")["top5_error"]
    for name in _AVERAGED:
        if all(name in seed for seed in seeds):
            content[name], content[f"{name}_std"] = mean_and_std([seed[name] for seed in seeds])
    for phase in ("unseen", "revisit"):
        if phase in first:
            content[phase] = {
                key: mean_and_std([seed[phase][key] for seed in seeds])[0] for key in first[phase] if key != "error"
            }
            content[phase] |= _by_domain_over_seeds([seed[phase] for seed in seeds], "error")
    seconds = sum(seed["timing"]["seconds"] for seed in seeds)
    images = sum(seed["images"] for seed in seeds)
    content |= {name: first[name] for name in ("config", "backwards_per_image", "models_held")}
    content["forwards_per_image"] = mean_and_std([seed["forwards_per_image"] for seed in seeds])[0]
    if first["guard"] is not None:
        content["guard"] = {name: sum(seed["guard"][name] for seed in seeds) for name in first["guard"]}
    content |= {name: first[name] for name in ("trainable_parameters", "adapted")}
    content["timing"] = {
        "seconds": seconds,
        "images_per_s": images / seconds if seconds else None,
        "peak_memory_bytes": max(seed["timing"]["peak_memory_bytes"] for seed in seeds),
    }
    content["seeds"] = {str(seed["seed"]): seed for seed in seeds}
    return content


def _by_domain_over_seeds(seeds: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, float | None]]:
    """Mean and standard deviation over seeds of an error by domain."""
    both = {domain: mean_and_std([seed[name][domain] for seed in seeds]) for domain in seeds[0][name]}
    return {
        name: {domain: mean for domain, (mean, _) in both.items()},
        f"{name}_std": {domain: std for domain, (_, std) in both.items()},
    }


def _standard_errors(runs: Sequence[Mapping[str, Outcomes]]) -> dict[str, Any]:
    adapted = [run["adapt"] for run in runs]
    return {
        "error_se": {domain: standard_error(adapted, [domain]) for domain in adapted[0]},
        "mean_se": standard_error(adapted, adapted[0]),
    }


def _compare(methods: Mapping[str, dict[str, Any]], runs: Mapping[str, Sequence[Outcomes]]) -> None:
    """Tell what each method gains over the source, and how sure that is."""
    source = methods.get("source")
    for name, content in methods.items():
        content["gain"] = None if source is None else source["mean"] - content["mean"]
        if source is not None and name != "source":
            domains = list(content["error"])
            content["gain_se"] = paired_standard_error(runs["source"], runs[name], domains)
            content["gain_by_domain"] = {
                domain: source["error"][domain] - content["error"][domain] for domain in domains
            }
            content["gain_by_domain_se"] = {
                domain: paired_standard_error(runs["source"], runs[name], [domain]) for domain in domains
            }


def _seeds_last(content: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of all seeds before those of each."""
    return {**{name: value for name, value in content.items() if name != "seeds"}, "seeds": content["seeds"]}
