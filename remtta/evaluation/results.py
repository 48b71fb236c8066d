"""From prediction rows and run records to `results.json` and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remtta.evaluation.metrics import Tally, harmonic_mean, mean_and_std
from remtta.runs.reading import read_rows

DELTAS = "deltas"
PLOTS = "plots"

Place = tuple[str, int | None]
"""A domain's name and severity."""

Tallies = dict[tuple[str, int], dict[str, dict[Place, Tally]]]
"""By method and seed, then phase, then domain and severity."""


def delta_path(folder: Path, method: str, seed: int | str) -> Path:
    """Where an evaluation keeps a run's delta."""
    return folder / DELTAS / f"{method}_seed{seed}.safetensors"


def tally_rows(path: Path) -> Tallies:
    """Outcomes by method, seed, phase, domain and severity."""
    tallies: Tallies = {}
    for row in read_rows(path):
        if "error" not in row:
            phases = tallies.setdefault((row["method"], row["seed"]), {})
            place = row["domain"], row.get("severity")
            phases.setdefault(row["phase"], {}).setdefault(place, Tally()).add(row)
    return tallies


def summarise(tallies: Tallies, runs: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """The `methods` part of `results.json`.

    Args:
        tallies: Outcomes of all runs.
        runs: A record per run, with its method and seed.
        order: Names of the domains, in the order of the table.

    Returns:
        For each method the means over seeds, their standard deviations, and the
        numbers of each seed.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        phases = tallies.get((run["method"], run["seed"]), {})
        by_method.setdefault(run["method"], []).append({**run, **_one_seed(phases, order)})
    methods = {name: _over_seeds(seeds) for name, seeds in by_method.items()}
    source = methods.get("source")
    for content in methods.values():
        content["gain"] = None if source is None else source["mean"] - content["mean"]
    return methods


def _by_domain(tallies: Mapping[Place, Tally], order: Sequence[str]) -> dict[str, Tally]:
    """The severities of each domain together, in order."""
    together: dict[str, Tally] = {}
    for (name, _), tally in tallies.items():
        together[name] = tally.merged([together[name]] if name in together else [])
    return {name: together[name] for name in order if name in together}


def _one_seed(phases: Mapping[str, Mapping[Place, Tally]], order: Sequence[str]) -> dict[str, Any]:
    adapted = _by_domain(phases.get("adapt", {}), order)
    errors = {domain: tally.error for domain, tally in adapted.items()}
    together = Tally().merged(adapted.values()).summary()
    content: dict[str, Any] = {
        "error": errors,
        "mean": mean_and_std(list(errors.values()))[0],
        "domains": {domain: tally.summary() for domain, tally in adapted.items()},
        "error_by_severity": {
            f"{name}{severity}": tally.error
            for (name, severity), tally in phases.get("adapt", {}).items()
            if severity is not None
        },
        **{name: value for name, value in together.items() if name not in ("error", "images")},
    }
    for phase in ("unseen", "revisit"):
        if phase in phases:
            again = {domain: tally.error for domain, tally in _by_domain(phases[phase], order).items()}
            content[phase] = {"error": again, "mean": mean_and_std(list(again.values()))[0]}
    if "unseen" in content:
        content["unseen"]["harmonic_mean"] = harmonic_mean(content["mean"], content["unseen"]["mean"])
    return content


_AVERAGED = ("mean", "ece", "diversity", "tvd")


def _over_seeds(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = seeds[0]
    errors = {domain: mean_and_std([seed["error"][domain] for seed in seeds]) for domain in first["error"]}
    content: dict[str, Any] = {
        "error": {domain: mean for domain, (mean, _) in errors.items()},
        "error_std": {domain: std for domain, (_, std) in errors.items()},
    }
    for name in _AVERAGED:
        if all(name in seed for seed in seeds):
            content[name], content[f"{name}_std"] = mean_and_std([seed[name] for seed in seeds])
    for phase in ("unseen", "revisit"):
        if phase in first:
            content[phase] = {
                key: mean_and_std([seed[phase][key] for seed in seeds])[0] for key in first[phase] if key != "error"
            }
            content[phase]["error"] = {
                domain: mean_and_std([seed[phase]["error"][domain] for seed in seeds])[0]
                for domain in first[phase]["error"]
            }
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


def table_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the final table: error in percent per domain, mean, gain, ECE, speed."""
    methods: Mapping[str, Any] = results["methods"]
    domains = list(next(iter(methods.values()))["error"])
    extra = [phase for phase in ("unseen", "revisit") if phase in next(iter(methods.values()))]
    header = ["error in %", *domains, "mean", "gain", "ECE %", *extra, "images/s"]
    return header, [_table_row(name, content, domains, extra) for name, content in methods.items()]


def _table_row(name: str, content: Mapping[str, Any], domains: Sequence[str], extra: Sequence[str]) -> list[str]:
    spread = content["mean_std"]
    rate = content["timing"]["images_per_s"]
    return [
        name,
        *(f"{content['error'][domain]:.1f}" for domain in domains),
        f"{content['mean']:.1f}" + ("" if spread is None else f" ± {spread:.1f}"),
        "" if content["gain"] is None else f"{content['gain']:+.1f}",
        f"{100 * content['ece']:.1f}",
        *(f"{content[phase]['mean']:.1f}" for phase in extra),
        "" if rate is None else f"{rate:.1f}",
    ]


def markdown_table(results: Mapping[str, Any]) -> str:
    """The final table in Markdown, ready to paste, and below it what each method costs."""
    return _markdown(*table_rows(results)) + "\n" + _markdown(*cost_rows(results))


def cost_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the efficiency table, as in the paper's; passes are per image, time for 1,000 of them."""
    header = ["efficiency", "parameters", "forward passes", "backward passes", "models held", "s per 1,000 images"]
    return header, [_cost_row(name, content) for name, content in results["methods"].items()]


def _cost_row(name: str, content: Mapping[str, Any]) -> list[str]:
    rate = content["timing"]["images_per_s"]
    return [
        name,
        f"{content['trainable_parameters']:,}",
        f"{content['forwards_per_image']:.3g}",
        f"{content['backwards_per_image']:.3g}",
        str(content["models_held"]),
        f"{1000 / rate:.1f}" if rate else "",
    ]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def plain_table(results: Mapping[str, Any]) -> str:
    """The final table in columns, one line per domain so that it fits a terminal."""
    header, rows = table_rows(results)
    columns = [header, *rows]
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )
