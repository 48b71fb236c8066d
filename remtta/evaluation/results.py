"""Compute `results.json` from tallies and trial records, with standard errors over images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import harmonic_mean
from typing import Any

import numpy as np

from remtta.evaluation.tally import TOP, Tallies, Tally, counts_by, mean_and_std, padded_sum, tally_of
from remtta.runs.tables import AGAIN

MAX_CLASSES = 1000  # listed individually in results.json

_AVERAGED = ("mean", "top5", "ece", "diversity", "tvd")

Outcomes = Mapping[str, Tally]
"""A trial's predictions by domain."""


def summarise(
    tallies: Tallies, trials: Sequence[Mapping[str, Any]], order: Sequence[str], num_classes: int
) -> dict[str, Any]:
    """Return the `methods` part of `results.json`: for each method the means over seeds, their standard deviations and
    standard errors, and the numbers of each seed.

    Args:
        trials: The record of each trial, with its method and seed, in the order of the table.
        order: Names of the domains, in the order of the table.
        num_classes: Classes of the model; with five or fewer, top-5 errors are left out.
    """
    methods: dict[str, dict[str, Any]] = {}
    adapted: dict[str, list[Outcomes]] = {}
    seeds: dict[str, list[dict[str, Any]]] = {}
    for name, of_method in groupby(trials, key=lambda trial: str(trial["method"])):
        own = list(of_method)
        places = [tallies[name, trial["seed"]] for trial in own]
        phases = [{phase: _by_domain(each[phase], order) for phase in each} for each in places]
        adapted[name] = [each["adapt"] for each in phases]
        seeds[name] = [
            {**trial, **_one_seed(by_phase, by_place["adapt"], num_classes > TOP)}
            for trial, by_phase, by_place in zip(own, phases, places, strict=True)
        ]
        domains = list(adapted[name][0])
        methods[name] = _over_seeds(seeds[name]) | {
            "error_se": {domain: standard_error(adapted[name], [domain]) for domain in domains},
            "mean_se": standard_error(adapted[name], domains),
            "class_error": class_errors(tally_of(tallies, name)),
        }
    for name, content in methods.items():
        content |= _gains(methods, adapted, name)
        content["seeds"] = {str(seed["seed"]): seed for seed in seeds[name]}
    return methods


def _by_domain(places: Mapping[tuple[str, int | None], Tally], order: Sequence[str]) -> dict[str, Tally]:
    """Sum the severities of each domain, in order."""
    together: dict[str, Tally] = {}
    for (name, _), tally in places.items():
        together[name] = together.get(name, Tally()) + tally
    return {name: together[name] for name in order if name in together}


def _one_seed(
    phases: Mapping[str, Outcomes], places: Mapping[tuple[str, int | None], Tally], ranked: bool
) -> dict[str, Any]:
    domains = {domain: tally.summary() for domain, tally in phases["adapt"].items()}
    together = sum(phases["adapt"].values(), Tally()).summary()
    content = _errors(phases["adapt"]) | {
        "domains": domains,
        "error_by_severity": {
            f"{name}{severity}": tally.error for (name, severity), tally in places.items() if severity is not None
        },
        **{name: value for name, value in together.items() if name not in ("error", "top5_error", "images")},
    }
    if ranked:
        content["top5_error"] = {domain: summary["top5_error"] for domain, summary in domains.items()}
        content["top5"] = mean_and_std(list(content["top5_error"].values()))[0]
    content |= {phase: _errors(phases[phase]) for phase in AGAIN if phase in phases}
    if "unseen" in content:
        content["unseen"]["harmonic_mean"] = harmonic_mean([content["mean"], content["unseen"]["mean"]])
    return content


def _errors(outcomes: Outcomes) -> dict[str, Any]:
    errors = {domain: tally.error for domain, tally in outcomes.items()}
    return {"error": errors, "mean": mean_and_std(list(errors.values()))[0]}


def _over_seeds(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = seeds[0]
    content = _by_domain_over_seeds(seeds, "error")
    if "top5_error" in first:
        content["top5_error"] = _by_domain_over_seeds(seeds, "top5_error")["top5_error"]
    for name in _AVERAGED:
        if all(name in seed for seed in seeds):
            content[name], content[f"{name}_std"] = mean_and_std([seed[name] for seed in seeds])
    for phase in (phase for phase in AGAIN if phase in first):
        again = [seed[phase] for seed in seeds]
        means = {key: mean_and_std([each[key] for each in again])[0] for key in first[phase] if key != "error"}
        content[phase] = means | _by_domain_over_seeds(again, "error")
    content |= {name: first[name] for name in ("config", "models_held")}
    for name in ("forwards_per_image", "backwards_per_image"):
        content[name] = mean_and_std([seed[name] for seed in seeds])[0]
    if first["guard"] is not None:
        content["guard"] = {name: sum(seed["guard"][name] for seed in seeds) for name in first["guard"]}
    content |= {name: first[name] for name in ("trainable_parameters", "adapted")}
    seconds = sum(seed["timing"]["seconds"] for seed in seeds)
    content["timing"] = {
        "seconds": seconds,
        "images_per_s": sum(seed["images"] for seed in seeds) / seconds if seconds else None,
        "peak_memory_bytes": max(seed["timing"]["peak_memory_bytes"] for seed in seeds),
    }
    return content


def _by_domain_over_seeds(seeds: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean and standard deviation over seeds of an error by domain."""
    both = {domain: mean_and_std([seed[name][domain] for seed in seeds]) for domain in seeds[0][name]}
    return {
        name: {domain: mean for domain, (mean, _) in both.items()},
        f"{name}_std": {domain: std for domain, (_, std) in both.items()},
    }


def _gains(
    methods: Mapping[str, Mapping[str, Any]], adapted: Mapping[str, Sequence[Outcomes]], name: str
) -> dict[str, Any]:
    source, content = methods.get("source"), methods[name]
    if source is None:
        return {"gain": None}
    gain: dict[str, Any] = {"gain": source["mean"] - content["mean"]}
    if name == "source":
        return gain
    pair, domains = (adapted["source"], adapted[name]), list(content["error"])
    return gain | {
        "gain_se": paired_standard_error(*pair, domains),
        "gain_by_domain": {domain: source["error"][domain] - content["error"][domain] for domain in domains},
        "gain_by_domain_se": {domain: paired_standard_error(*pair, [domain]) for domain in domains},
    }


def class_errors(tally: Tally) -> dict[str, float] | None:
    """Return the error in percent of each class that has images, by number; None if there are over 1,000 classes."""
    truths, predicted, times = tally.confusion
    numbers, images = counts_by(truths, times)
    if len(numbers) > MAX_CLASSES:
        return None
    _, right = counts_by(truths, times * (truths == predicted))
    errors = 100 * (1 - right / images)
    return {str(number): float(error) for number, error in zip(numbers.tolist(), errors, strict=True)}


def standard_error(trials: Sequence[Outcomes], domains: Iterable[str]) -> float:
    """Return the standard error, in percentage points, of the mean error over trials and domains.

    Let E be the mean of the P errors of all trials and domains with n images each. Image i contributes u_i = sum of
    (wrong - error) / (P n) over its predictions, and the standard error is sqrt(sum of u_i^2). For one domain of one
    trial that is the binomial sqrt(p (1 - p) / n). Each image counts once, however many trials, visits and corruptions
    include it, because those outcomes are correlated. A method's trials, one per seed, are on the same images.
    """
    tallies = [trial[domain] for domain in domains for trial in trials]
    return _root_of_squares(
        [(tally.wrong - tally.num_predictions * (tally.error / 100), len(tally)) for tally in tallies]
    )


def paired_standard_error(firsts: Sequence[Outcomes], seconds: Sequence[Outcomes], domains: Iterable[str]) -> float:
    """Return the standard error, in percentage points, of the difference of two methods' mean errors on the same
    images.

    As `standard_error`, with u_i = sum of (first wrong - second wrong) / (P n), so images on which both agree cancel
    out. For one domain of one trial, where b images are wrong only for the first and c only for the second, that is
    McNemar's sqrt(b + c) / n, the standard error if there were no difference. Both have a trial for each of the same
    seeds.
    """
    pairs = [(one[domain], other[domain]) for domain in domains for one, other in zip(firsts, seconds, strict=True)]
    return _root_of_squares([_differences(first, second) for first, second in pairs])


def _differences(first: Tally, second: Tally) -> tuple[np.ndarray, int]:
    """Return first minus second errors by image, and the number of shared predictions; either may lack some."""
    size = min(len(first.num_predictions), len(second.num_predictions))
    num_predictions = np.minimum(first.num_predictions[:size], second.num_predictions[:size])
    share = [tally.wrong[:size] / np.maximum(1, tally.num_predictions[:size]) for tally in (first, second)]
    return num_predictions * (share[0] - share[1]), int(num_predictions.sum())


def _root_of_squares(parts: Sequence[tuple[np.ndarray, int]]) -> float:
    """Return the standard error from the contributions of each image and the number of predictions, for each part."""
    moves = padded_sum([moves / (len(parts) * max(1, count)) for moves, count in parts])
    return 100 * float(np.sqrt((moves**2).sum()))
