"""Compute `results.json` from tallies and trial records, with standard errors over images."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import numpy as np

from remtta.files import write_atomically, write_json
from remtta.lab.evaluation.context import EvaluationContext
from remtta.lab.evaluation.tally import TOP, Tallies, Tally, errors_by_round, mean_and_std, padded_sum, tally_rows
from remtta.lab.evaluation.trial_writer import TrialRecord
from remtta.lab.tables import LATEX, PARTS, TABLE, latex_table, markdown_table
from remtta.runs.folder import PREDICTIONS, RESULTS
from remtta.runs.record import environment

MAX_CLASSES = 1000  # listed individually in results.json

_AVERAGED = ("error", "top5_error", "mean", "top5", "ece", "diversity", "tvd")

Results = dict[str, Any]
"""A part of `results.json`."""

Outcomes = Mapping[str, Tally]
"""A trial's predictions by domain."""


def write_results(folder: Path, context: EvaluationContext, trials: Iterable[TrialRecord]) -> Results:
    """Write the tables and `results.json` of finished trials, from the rows in the folder; return the latter."""
    rows, num_domains = folder / PREDICTIONS, len(context.dataset.domains)
    order = list(itertools.product(context.methods, context.options.seeds))
    ordered = sorted(trials, key=lambda trial: order.index((trial.method, trial.seed)))
    domains = list(dict.fromkeys(domain.name for domain in context.dataset.domains))
    content: Results = {
        "status": "completed",
        "methods": summarise(tally_rows(rows, by_path=num_domains == 1), ordered, domains, len(context.numbers)),
        "settings": context.settings(),
        "environment": environment(context.info.device),
    }
    if context.options.scenario == "recurring":
        num_unseen = sum(domain.name in context.options.unseen for domain in context.dataset.domains)
        for name, errors in errors_by_round(rows, num_domains - num_unseen).items():
            content["methods"][name]["error_by_round"] = errors
    write_tables(folder, content, context.options.columns)
    write_json(folder / RESULTS, content)  # last, as it marks completion
    return content


def write_tables(folder: Path, results: Results, columns: Sequence[str] | None) -> None:
    """Write the tables of an evaluation, with all columns or those chosen."""
    for name, text in ((TABLE, markdown_table(results, columns)), (LATEX, latex_table(results, columns))):
        write_atomically(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))


def summarise(
    tallies: Tallies, trials: Iterable[TrialRecord], order: Sequence[str], num_classes: int
) -> dict[str, Results]:
    """Return the `methods` part of `results.json`: for each method the means over seeds, their standard deviations and
    standard errors, and the numbers of each seed.

    Args:
        trials: The records of all trials, in the order of the table.
        order: Names of the domains, in the order of the table.
        num_classes: Classes of the model; with five or fewer, top-5 errors are left out.
    """
    methods: dict[str, Results] = {}
    adapted: dict[str, list[Outcomes]] = {}
    firsts: dict[str, list[Outcomes]] = {}
    for name, records in itertools.groupby(trials, key=lambda trial: trial.method):
        seeds = {str(trial.seed): _one_seed(tallies, trial, order, num_classes > TOP) for trial in records}
        adapted[name] = [_outcomes(tallies, name, int(seed), "adapt", order) for seed in seeds]
        domains = list(adapted[name][0])
        method_total = Tally.total(tally for outcomes in adapted[name] for tally in outcomes.values())
        methods[name] = _over_seeds(list(seeds.values())) | {
            "error_se": {domain: standard_error(adapted[name], [domain]) for domain in domains},
            "mean_se": standard_error(adapted[name], domains),
            "class_error": _class_errors(method_total),
            "seeds": seeds,
        }
        firsts[name] = [_outcomes(tallies, name, int(seed), "first", order) for seed in seeds]
    for name, content in methods.items():
        content |= _gains(methods, adapted, name)
        if "gain_by_domain" in content:
            content["first"] |= _gains_on(adapted["source"], firsts[name])
    return methods


def _outcomes(tallies: Tallies, method: str, seed: int, phase: str, order: Sequence[str]) -> Outcomes:
    """Return a trial's outcomes in a phase, over all severities, by domain in order."""
    domains: dict[str, list[Tally]] = {}
    for key, tally in tallies.items():
        if key[:3] == (method, seed, phase):
            domains.setdefault(key.domain, []).append(tally)
    return {name: Tally.total(domains[name]) for name in order if name in domains}


def _one_seed(tallies: Tallies, trial: TrialRecord, order: Sequence[str], ranked: bool) -> Results:
    outcomes = _outcomes(tallies, trial.method, trial.seed, "adapt", order)
    domains = {domain: tally.summary() for domain, tally in outcomes.items()}
    total = Tally.total(outcomes.values()).summary()
    content = (
        asdict(trial)
        | _errors(outcomes)
        | {
            "domains": domains,
            "error_by_severity": {
                f"{key.domain}{key.severity}": tally.error
                for key, tally in tallies.items()
                if key[:3] == (trial.method, trial.seed, "adapt") and key.severity is not None
            },
            **{name: value for name, value in total.items() if name not in ("error", "top5_error", "images")},
        }
    )
    if ranked:
        content["top5_error"] = {domain: summary["top5_error"] for domain, summary in domains.items()}
        content["top5"] = mean_and_std(list(content["top5_error"].values()))[0]
    for phase in PARTS:
        if again := _outcomes(tallies, trial.method, trial.seed, phase, order):
            content[phase] = _errors(again)
    if "unseen" in content:
        content["unseen"]["harmonic_mean"] = harmonic_mean([content["mean"], content["unseen"]["mean"]])
    return content


def _errors(outcomes: Outcomes) -> Results:
    errors = {domain: tally.error for domain, tally in outcomes.items()}
    return {"error": errors, "mean": mean_and_std(list(errors.values()))[0]}


def _over_seeds(seeds: Sequence[Results]) -> Results:
    first, seconds = seeds[0], sum(seed["timing"]["seconds"] for seed in seeds)
    content = _averaged(seeds, _AVERAGED)
    for phase in (phase for phase in PARTS if phase in first):
        content[phase] = _averaged([seed[phase] for seed in seeds], list(first[phase]))
    content |= {name: first[name] for name in ("config", "models_held", "trainable_parameters", "adapted")}
    for name in ("forwards_per_image", "backwards_per_image"):
        content[name] = mean_and_std([seed[name] for seed in seeds])[0]
    if first["guard"] is not None:
        content["guard"] = {name: sum(seed["guard"][name] for seed in seeds) for name in first["guard"]}
    content["timing"] = {
        "seconds": seconds,
        "images_per_s": sum(seed["images"] for seed in seeds) / seconds if seconds else None,
        "peak_memory_bytes": max(seed["timing"]["peak_memory_bytes"] for seed in seeds),
    }
    return content


def _averaged(seeds: Sequence[Results], names: Sequence[str]) -> Results:
    """Return the mean and standard deviation over seeds of numbers, or of numbers by domain, that all seeds have."""
    content: Results = {}
    for name in (name for name in names if all(name in seed for seed in seeds)):
        values = [seed[name] for seed in seeds]
        if isinstance(values[0], dict):
            both = {domain: mean_and_std([value[domain] for value in values]) for domain in values[0]}
            content[name] = {domain: mean for domain, (mean, _) in both.items()}
            content[f"{name}_std"] = {domain: std for domain, (_, std) in both.items()}
        else:
            content[name], content[f"{name}_std"] = mean_and_std(values)
    return content


def _gains(methods: Mapping[str, Results], adapted: Mapping[str, Sequence[Outcomes]], name: str) -> Results:
    source, content = methods.get("source"), methods[name]
    if source is None:
        return {"gain": None}
    gain: Results = {"gain": source["mean"] - content["mean"]}
    if name == "source":
        return gain
    pair, domains = (adapted["source"], adapted[name]), list(content["error"])
    return gain | {
        "changed_images": sum(_num_changed(*tallies) for domain in domains for tallies in _paired(*pair, domain)),
        "gain_se": paired_standard_error(*pair, domains),
        "gain_by_domain": {domain: source["error"][domain] - content["error"][domain] for domain in domains},
        "gain_by_domain_se": {domain: paired_standard_error(*pair, [domain]) for domain in domains},
    }


def _gains_on(source: Sequence[Outcomes], parts: Sequence[Outcomes]) -> Results:
    """Return the gains over the source model on the images of a part, by seed, of all that the source predicted."""
    gains = {}
    for domain in parts[0]:
        differences = [_differences(*pair) for pair in _paired(source, parts, domain)]
        gains[domain] = 100 * float(np.mean([values.sum() / max(1, count) for values, count in differences]))
    error = paired_standard_error(source, parts, list(gains))
    return {"gain": float(np.mean(list(gains.values()))), "gain_se": error, "gain_by_domain": gains}


def _paired(firsts: Sequence[Outcomes], seconds: Sequence[Outcomes], domain: str) -> Iterator[tuple[Tally, Tally]]:
    """Yield both methods' outcomes of a domain for each seed; the first, the source model, may have a single one."""
    return ((first[domain], second[domain]) for first, second in zip(itertools.cycle(firsts), seconds, strict=False))


def _num_changed(first: Tally, second: Tally) -> int:
    """Return the number of images that both predicted with different classes."""
    size = min(len(first.class_sums), len(second.class_sums))
    return int(np.count_nonzero(first.class_sums[:size] != second.class_sums[:size]))


def _class_errors(tally: Tally) -> dict[str, float] | None:
    """Return the error in percent of each class that has images, by number; None if there are over 1,000 classes."""
    numbers = np.flatnonzero(tally.num_true)
    if len(numbers) > MAX_CLASSES:
        return None
    right = padded_sum([np.zeros_like(tally.num_true), tally.num_right])
    errors = 100 * (1 - right[numbers] / tally.num_true[numbers])
    return {str(number): float(error) for number, error in zip(numbers, errors, strict=True)}


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
    seeds, or the first one, the source model, a single trial.
    """
    pairs = (pair for domain in domains for pair in _paired(firsts, seconds, domain))
    return _root_of_squares([_differences(*pair) for pair in pairs])


def _differences(first: Tally, second: Tally) -> tuple[np.ndarray, int]:
    """Return first minus second errors by image, and the number of shared predictions; either may lack some."""
    size = min(len(first.num_predictions), len(second.num_predictions))
    num_predictions = np.minimum(first.num_predictions[:size], second.num_predictions[:size])
    share = [tally.wrong[:size] / np.maximum(1, tally.num_predictions[:size]) for tally in (first, second)]
    return num_predictions * (share[0] - share[1]), int(num_predictions.sum())


def _root_of_squares(contributions: Sequence[tuple[np.ndarray, int]]) -> float:
    """Return the standard error from the contributions of each image and the number of predictions, by trial."""
    scaled = [values / (len(contributions) * max(1, count)) for values, count in contributions]
    return 100 * float(np.sqrt((padded_sum(scaled) ** 2).sum()))
