"""From tallies and records of trials to `results.json`, with standard errors by the number of images."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from remtta.evaluation.tables import TABLES
from remtta.evaluation.tally import TOP, Tallies, Tally, counts_by, mean_and_std, padded_sum, tally_of
from remtta.files import write_atomically, write_json, writing
from remtta.runs.folder import RESULTS

CONFUSION = "confusion"
MOST_CLASSES = 1000  # told one by one in results.json

_AVERAGED = ("mean", "top5", "ece", "diversity", "tvd")
_AGAIN = ("unseen", "revisit")

Outcomes = Mapping[str, Tally]
"""A trial's predictions by domain."""


def write_results(folder: Path, content: dict[str, Any], tallies: Tallies, names: Mapping[int, str]) -> None:
    """Write the tables, a confusion matrix per method, and at last `results.json`, which says that all is there.

    `names` are those of the classes, by number, where they have any.

    Raises:
        OutputError: If the disk refuses.
    """
    with writing(folder):
        (folder / CONFUSION).mkdir(exist_ok=True)
    for method in content["methods"]:
        write = partial(_write_confusion, tally=tally_of(tallies, method), names=names)
        write_atomically(folder / CONFUSION / f"{method}.csv", write)
    for name, table in TABLES.items():
        write_atomically(folder / name, partial(Path.write_text, data=table(content), encoding="utf-8"))
    write_json(folder / RESULTS, content)


def _write_confusion(path: Path, tally: Tally, names: Mapping[int, str]) -> None:
    """Write how many images of which class were taken for which: the entries of the matrix that are not zero."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["true", "predicted", "images", "true_label", "predicted_label"])
        rows.writerows([*each, *(names.get(number, "") for number in each[:2])] for each in tally.confusion.T.tolist())


def summarise(
    tallies: Tallies, trials: Sequence[Mapping[str, Any]], order: Sequence[str], num_classes: int
) -> dict[str, Any]:
    """The `methods` part of `results.json`.

    Args:
        tallies: Outcomes of all trials.
        trials: A record of each, with its method and seed, in the order of the table.
        order: Names of the domains, in the order of the table.
        num_classes: Classes of the model; five of so few or less are no feat.

    Returns:
        For each method the means over seeds, their standard deviations and
        standard errors, and the numbers of each seed.
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
    """The severities of each domain together, in order."""
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
    if ranked and "top5_error" in together:
        content["top5_error"] = {domain: summary["top5_error"] for domain, summary in domains.items()}
        content["top5"] = mean_and_std(list(content["top5_error"].values()))[0]
    content |= {phase: _errors(phases[phase]) for phase in _AGAIN if phase in phases}
    if "unseen" in content:
        content["unseen"]["harmonic_mean"] = harmonic_mean(content["mean"], content["unseen"]["mean"])
    return content


def _errors(outcomes: Outcomes) -> dict[str, Any]:
    errors = {domain: tally.error for domain, tally in outcomes.items()}
    return {"error": errors, "mean": mean_and_std(list(errors.values()))[0]}


def _over_seeds(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = seeds[0]
    content = _by_domain_over_seeds(seeds, "error")
    if all("top5_error" in seed for seed in seeds):
        content["top5_error"] = _by_domain_over_seeds(seeds, "top5_error")["top5_error"]
    for name in _AVERAGED:
        if all(name in seed for seed in seeds):
            content[name], content[f"{name}_std"] = mean_and_std([seed[name] for seed in seeds])
    for phase in (phase for phase in _AGAIN if phase in first):
        again = [seed[phase] for seed in seeds]
        means = {key: mean_and_std([each[key] for each in again])[0] for key in first[phase] if key != "error"}
        content[phase] = means | _by_domain_over_seeds(again, "error")
    content |= {name: first[name] for name in ("config", "backwards_per_image", "models_held")}
    content["forwards_per_image"] = mean_and_std([seed["forwards_per_image"] for seed in seeds])[0]
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
    """Mean and standard deviation over seeds of an error by domain."""
    both = {domain: mean_and_std([seed[name][domain] for seed in seeds]) for domain in seeds[0][name]}
    return {
        name: {domain: mean for domain, (mean, _) in both.items()},
        f"{name}_std": {domain: std for domain, (_, std) in both.items()},
    }


def _gains(
    methods: Mapping[str, Mapping[str, Any]], adapted: Mapping[str, Sequence[Outcomes]], name: str
) -> dict[str, Any]:
    """What a method gains over the source, and how sure that is."""
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
    """Error in percent of the images of each class.

    Returns:
        By class number, ascending, of the classes that there are images of; None if they are more than 1,000.
    """
    truths, predicted, times = tally.confusion
    numbers, images = counts_by(truths, times)
    if len(numbers) > MOST_CLASSES:
        return None
    _, right = counts_by(truths, times * (truths == predicted))
    errors = 100 * (1 - right / images)
    return {str(number): float(error) for number, error in zip(numbers.tolist(), errors, strict=True)}


def harmonic_mean(first: float, second: float) -> float:
    """Harmonic mean of two errors, as in the paper's forward transfer table."""
    return 2 * first * second / (first + second) if first + second else 0.0


def standard_error(trials: Sequence[Outcomes], domains: Iterable[str]) -> float:
    """Standard error, in percentage points, of the mean error over trials and domains.

    With E the mean of the P errors of all trials and domains, and n images in each, image i moves E by
    u_i = sum of (wrong - error) / (P n) over its predictions. The standard error is sqrt(sum of u_i^2): in one domain
    of one trial that is the binomial sqrt(p (1 - p) / n). An image counts once, however many trials, visits and
    corruptions there are of it, as these are often right or wrong together.

    Args:
        trials: Those of a method, one per seed, on the same images.
        domains: Which ones.
    """
    tallies = [trial[domain] for domain in domains for trial in trials]
    return _root_of_squares([(tally.wrong - tally.asked * (tally.error / 100), len(tally)) for tally in tallies])


def paired_standard_error(firsts: Sequence[Outcomes], seconds: Sequence[Outcomes], domains: Iterable[str]) -> float:
    """Standard error, in percentage points, of the difference of two methods' mean errors on the same images.

    As `standard_error`, with u_i = sum of (first wrong - second wrong) / (P n), so what both get right or wrong falls
    out. In one domain of one trial, where b images only the first gets wrong and c only the second, that is McNemar's
    sqrt(b + c) / n, the error if there were no difference.

    Args:
        firsts: Trials of a method, one per seed.
        seconds: Those of the other, with the same seeds.
        domains: Which ones.
    """
    pairs = [(one[domain], other[domain]) for domain in domains for one, other in zip(firsts, seconds, strict=True)]
    return _root_of_squares([_differences(first, second) for first, second in pairs])


def _differences(first: Tally, second: Tally) -> tuple[np.ndarray, int]:
    """First minus second wrong, by image, and how many predictions both have; of some, one may lack a few."""
    size = min(len(first.asked), len(second.asked))
    asked = np.minimum(first.asked[:size], second.asked[:size])
    share = [tally.wrong[:size] / np.maximum(1, tally.asked[:size]) for tally in (first, second)]
    return asked * (share[0] - share[1]), int(asked.sum())


def _root_of_squares(parts: Sequence[tuple[np.ndarray, int]]) -> float:
    """From what each image moves the sum of a part's outcomes by, and how many outcomes it has."""
    moves = padded_sum([moves / (len(parts) * max(1, count)) for moves, count in parts])
    return 100 * float(np.sqrt((moves**2).sum()))
