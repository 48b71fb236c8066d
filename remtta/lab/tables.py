"""The tables of an evaluation, for a terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from remtta.lab.evaluation.variants import CIFAR, MethodVariant
from remtta.runs.reading import aligned, printable

WITHIN = 2
"""A difference of up to this many standard errors is marked as insignificant (a level of about 5 %)."""

SAME = "≈"
"""Precedes an error or gain that does not differ significantly from the source model's."""

AGAIN = ("unseen", "revisit")
"""Phases of an evaluation that test again without updates."""

_NUMBER = re.compile(rf"[{SAME}+-]*[\d.]+( ± [\d.]+)?")
_ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
    }
)

_ENOUGH = 10  # updates, after which a method should have changed the class of some image

TABLE, LATEX = "table.md", "table.tex"
Table = tuple[list[str], list[list[str]]]


def table_rows(results: Mapping[str, Any]) -> Table:
    """Return header and rows of the main table: error in percent per domain, mean, gain, top-5 error, ECE, speed."""
    methods: Mapping[str, Mapping[str, Any]] = results["methods"]
    first = next(iter(methods.values()))
    extra = [phase for phase in AGAIN if phase in first]
    ranked = all("top5" in content for content in methods.values())
    header = ["error in %", *first["error"], "mean", "SE", "gain", *["top-5 error"] * ranked, "ECE %"]
    rows = []
    for name, content in methods.items():
        gain, rate = content["gain"], content["timing"]["images_per_s"]
        rows.append(
            [
                name,
                *(_cell(content, domain) for domain in first["error"]),
                _cell(content),
                f"{content['mean_se']:.1f}",
                "" if gain is None else f"{significance_mark(content)}{gain:+.1f}",
                *(f"{content[key]:.1f}" for key in ["top5"] * ranked),
                f"{100 * content['ece']:.1f}",
                *(f"{content[phase]['mean']:.1f}" for phase in extra),
                "" if rate is None else f"{rate:.1f}",
            ]
        )
    return [*header, *extra, "images/s"], rows


def notes(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each sign used in the main table."""
    _, rows = table_rows(results)
    cells = " ".join(cell for row in rows for cell in row[1:])
    num_seeds = max(len(content["seeds"]) for content in results["methods"].values())
    meanings = {
        SAME: f"{SAME} at most {WITHIN} standard errors from source, compared image by image",
        "+": "+ in gain: fewer errors than source",
        "±": f"± standard deviation over {num_seeds} seeds",
    }
    entries = [text for sign, text in meanings.items() if sign in cells]
    if start := results["settings"].get("start_delta"):
        entries.append(f"all methods, source included, start from {printable(start['path'])}")
    if all(content["gain"] is None for content in results["methods"].values()):
        entries.append("no gains, as source is not among the methods (add it, with --resume)")
    for name, content in results["methods"].items():
        is_trained = content["trainable_parameters"] > 0
        if (
            is_trained
            and content.get("changed_images") == 0
            and all(seed["updates"] >= _ENOUGH for seed in content["seeds"].values())
        ):
            method = MethodVariant.parse(name).method
            cifar = f", or for a model of CIFAR take {method}@cifar" if method in CIFAR else ""
            rate = f"--set {name}.lr=..., now {content['config'].get('lr', 0):g}"
            entries.append(f"{name} changed the class of no image; raise its learning rate ({rate}){cifar}")
    return [*entries, "SE standard error of the mean, by the number of images"]


def outcome(results: Mapping[str, Any]) -> str:
    """Return the gain of the best method over the source model in a sentence; empty without source."""
    methods = {name: content for name, content in results["methods"].items() if "supervised" not in name}  # has labels
    if len(methods) < 2 or "source" not in methods:
        return ""
    name, best = min(methods.items(), key=lambda item: item[1]["mean"])
    before = methods["source"]["mean"]
    if name == "source":
        return f"No method has fewer errors than the source model ({before:.1f} %)."
    error, chance = best.get("gain_se"), " This may be chance." if significance_mark(best) else ""
    by = "" if error is None else f", by {best['gain']:.1f} points (SE {error:.1f})"
    return f"With {name}, the mean error falls from {before:.1f} % (source model) to {best['mean']:.1f} %{by}.{chance}"


def _cell(content: Mapping[str, Any], domain: str | None = None) -> str:
    """Return a domain's error, or the mean, with its spread over seeds and the sign of insignificance."""
    names = ("mean", "mean_std") if domain is None else ("error", "error_std")
    error, spread = (content[name] if domain is None else content[name][domain] for name in names)
    return f"{significance_mark(content, domain)}{error:.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def significance_mark(content: Mapping[str, Any], domain: str | None = None) -> str:
    """Return `SAME` if a gain, a domain's or that of the mean, is not significant; else an empty string."""
    if content.get("gain_se") is None:
        return ""
    gains = ("gain", "gain_se") if domain is None else ("gain_by_domain", "gain_by_domain_se")
    gain, error = (content[name] if domain is None else content[name][domain] for name in gains)
    return SAME if abs(gain) <= WITHIN * error else ""


def uncertainty_rows(results: Mapping[str, Any]) -> Table:
    """Return header and rows of the table of standard errors, per domain and of the mean."""
    methods: Mapping[str, Any] = results["methods"]
    header = ["standard error", *next(iter(methods.values()))["error_se"], "mean", "gain"]
    return header, [
        [
            name,
            *(f"{value:.2f}" for value in (*content["error_se"].values(), content["mean_se"])),
            f"{content['gain_se']:.2f}" if "gain_se" in content else "",
        ]
        for name, content in methods.items()
    ]


def cost_rows(results: Mapping[str, Any]) -> Table:
    """Return header and rows of the efficiency table, as in the paper: passes per image, time per 1,000 images."""
    header = ["efficiency", "parameters", "forward passes", "backward passes", "models held", "s per 1,000 images"]
    rows = []
    for name, content in results["methods"].items():
        rate = content["timing"]["images_per_s"]
        passes = [f"{content[f'{way}_per_image']:.3g}" for way in ("forwards", "backwards")]
        held, seconds = str(content["models_held"]), f"{1000 / rate:.1f}" if rate else ""
        rows.append([name, f"{content['trainable_parameters']:,}", *passes, held, seconds])
    return header, rows


def markdown_table(results: Mapping[str, Any]) -> str:
    """Return the main table in Markdown, followed by its legend, standard errors and costs."""
    first, *others = map(_markdown, (table_rows(results), uncertainty_rows(results), cost_rows(results)))
    return "\n".join([first, f"{'; '.join(notes(results))}.\n", *others])


def _markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    escaped = ([escape(printable(cell), quote=False).replace("|", "\\|") for cell in cells] for cells in lines)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def latex_table(results: Mapping[str, Any]) -> str:
    """Return the main table as a LaTeX tabular, which needs no package, with its legend as comments."""
    names, cells = table_rows(results)
    header, *rows = (f"{' & '.join(map(_latex, row))} \\\\" for row in (names, *cells))
    lines = [r"\hline", header, r"\hline", *rows, r"\hline"]
    legend = [f"% {printable(note)}" for note in notes(results)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}"
    return "\n".join([*legend, begin, *lines, r"\end{tabular}", ""])


def _latex(cell: str) -> str:
    if _NUMBER.fullmatch(cell):
        return "$" + cell.replace(SAME, r"\approx ").replace("±", r"\pm") + "$"
    return printable(cell).translate(_ESCAPES)


def plain_table(results: Mapping[str, Any]) -> str:
    """Return the main table in aligned columns for a terminal, followed by its legend."""
    header, rows = table_rows(results)
    return "\n".join([*aligned(zip(header, *rows, strict=True)), *notes(results)])
