"""The tables of an evaluation, for a terminal, as Markdown and in LaTeX."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from remtta.errors import UsageError, unknown
from remtta.lab.corruptions.parameters import CORRUPTIONS, parts_of
from remtta.lab.evaluation.variants import CIFAR, MethodVariant
from remtta.runs.reading import aligned, printable

WITHIN = 2
"""A difference of up to this many standard errors is marked as insignificant (a level of about 5 %)."""

SAME = "≈"
"""Precedes an error or gain that does not differ significantly from the source model's."""

PARTS = {"first": "first 50", "unseen": "unseen", "revisit": "revisit"}
"""Parts of an evaluation with errors of their own, and their headers: the first images of each condition, and phases
that test again without updates.
"""

_NUMBER = re.compile(rf"{SAME}?(?P<text>(?P<value>[+-]?[\d.]+)( ± [\d.]+)?)")
_ROUNDING = 1e-9  # percentage points; differences of means may be off by so much
_SHORT = dict(
    zip(
        CORRUPTIONS,
        (
            *("Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit."),
            *("Contr.", "Elastic", "Pixel.", "JPEG", "Speckle", "Spatter", "Gauss. blur", "Satur."),
        ),
        strict=True,
    )
)
_ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)

_ENOUGH = 10  # updates, after which a method should have changed the class of some image

TABLE, LATEX = "table.md", "table.tex"
Table = tuple[list[str], list[list[str]]]
Content = Mapping[str, Any]
"""`results.json`, or its part on a method."""


class Column(NamedTuple):
    """A column of the main table."""

    name: str  # in `--columns`
    header: str
    cell: Callable[[Content], str]  # of a method
    best: Callable[[Iterable[float]], float] | None = None  # which value is the best, if one is


def table_columns(
    domains: Iterable[str], parts: Iterable[str], *, ranked: bool, chosen: Sequence[str] | None = None
) -> list[Column]:
    """Return the columns of the main table, or those chosen, in their order; raise UsageError if one is unknown
    or repeated.

    Args:
        domains: Names of the domains that methods adapt to.
        parts: Those of `PARTS` that the evaluation has.
        ranked: Whether it has top-5 errors.
        chosen: Names of domains or of other columns; "domains" are all of them.
    """
    of_domains = [Column(domain, domain, partial(_cell, domain=domain), min) for domain in domains]
    others = [
        Column("mean", "mean", _cell, min),
        Column("se", "SE", lambda content: f"{content['mean_se']:.1f}"),
        Column("gain", "gain", _gain, max),
        *[Column("top5", "top-5 error", lambda content: f"{content['top5']:.1f}", min)] * ranked,
        Column("ece", "ECE %", lambda content: f"{100 * content['ece']:.1f}", min),
        *(Column(part, PARTS[part], partial(_mean_of, part=part), min) for part in parts),
        Column("speed", "images/s", _rate),
    ]
    if not chosen:
        return [*of_domains, *others]
    known = {**{column.name: [column] for column in (*others, *of_domains)}, "domains": of_domains}
    if missing := [name for name in chosen if name not in known]:
        raise unknown("column", missing[0], dict.fromkeys(["domains", *known]))
    columns = [column for name in chosen for column in known[name]]
    if repeated := [column.name for place, column in enumerate(columns) if column in columns[:place]]:
        raise UsageError(f'--columns has "{repeated[0]}" twice (domains are all of them); name each column once')
    return columns


def _columns(results: Content, chosen: Sequence[str] | None) -> list[Column]:
    contents = list(results["methods"].values())
    parts = [part for part in PARTS if part in contents[0]]
    ranked = all("top5" in content for content in contents)
    return table_columns(contents[0]["error"], parts, ranked=ranked, chosen=chosen)


def table_rows(results: Content, chosen: Sequence[str] | None = None) -> Table:
    """Return header and rows of the main table: error in percent per domain, mean, gain, top-5 error, ECE, speed; or of
    the chosen columns (see `table_columns`).
    """
    columns = _columns(results, chosen)
    rows = [[name, *(column.cell(content) for column in columns)] for name, content in results["methods"].items()]
    return ["error in %", *(column.header for column in columns)], rows


def notes(results: Content, chosen: Sequence[str] | None = None) -> list[str]:
    """Return a line for each sign used in the main table."""
    header, rows = table_rows(results, chosen)
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
    in_bf16 = [name for name, content in results["methods"].items() if content["config"].get("precision") == "bf16"]
    if in_bf16:
        entries.append(f"bf16 matrix products in {', '.join(in_bf16)}")
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
    return [*entries, *["SE standard error of the mean, by the number of images"] * ("SE" in header)]


def outcome(results: Content) -> str:
    """Return the gain of the best method over the source model in a sentence; empty without source."""
    methods = {name: content for name, content in results["methods"].items() if not _has_labels(name)}
    if len(methods) < 2 or "source" not in methods:
        return ""
    name, best = min(methods.items(), key=lambda item: item[1]["mean"])
    before = methods["source"]["mean"]
    if before - best["mean"] <= _ROUNDING:
        return f"No method has fewer errors than the source model ({before:.1f} %)."
    error, chance = best.get("gain_se"), " This may be chance." if significance_mark(best) else ""
    by = "" if error is None else f", by {best['gain']:.1f} points (SE {error:.1f})"
    return f"With {name}, the mean error falls from {before:.1f} % (source model) to {best['mean']:.1f} %{by}.{chance}"


def _has_labels(name: str) -> bool:
    """Return whether a row is an upper bound, which learns from the true labels."""
    return MethodVariant.parse(name).method == "supervised"


def _cell(content: Content, domain: str | None = None) -> str:
    """Return a domain's error, or the mean, with its spread over seeds and the sign of insignificance."""
    names = ("mean", "mean_std") if domain is None else ("error", "error_std")
    error, spread = (content[name] if domain is None else content[name][domain] for name in names)
    return f"{significance_mark(content, domain)}{error:.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def _gain(content: Content) -> str:
    return "" if content["gain"] is None else f"{significance_mark(content)}{content['gain']:+z.1f}"


def _mean_of(content: Content, part: str) -> str:
    """Return the mean error of a part, with the sign of insignificance if it is of the same images as the source's."""
    return f"{significance_mark(content[part])}{content[part]['mean']:.1f}"


def _rate(content: Content) -> str:
    rate = content["timing"]["images_per_s"]
    return "" if rate is None else f"{rate:.1f}"


def significance_mark(content: Content, domain: str | None = None) -> str:
    """Return `SAME` if a gain, a domain's or that of the mean, is not significant; else an empty string."""
    if content.get("gain_se") is None:
        return ""
    gains = ("gain", "gain_se") if domain is None else ("gain_by_domain", "gain_by_domain_se")
    gain, error = (content[name] if domain is None else content[name][domain] for name in gains)
    return SAME if abs(gain) <= WITHIN * error + _ROUNDING else ""


def uncertainty_rows(results: Content) -> Table:
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


def cost_rows(results: Content) -> Table:
    """Return header and rows of the efficiency table, as in the paper: passes per image, time per 1,000 images."""
    header = ["efficiency", "parameters", "forward passes", "backward passes", "models held", "s per 1,000 images"]
    rows = []
    for name, content in results["methods"].items():
        rate = content["timing"]["images_per_s"]
        passes = [f"{content[f'{way}_per_image']:.3g}" for way in ("forwards", "backwards")]
        held, seconds = str(content["models_held"]), f"{1000 / rate:.1f}" if rate else ""
        rows.append([name, f"{content['trainable_parameters']:,}", *passes, held, seconds])
    return header, rows


def markdown_table(results: Content, chosen: Sequence[str] | None = None) -> str:
    """Return the main table in Markdown, followed by its legend, standard errors and costs."""
    first, *others = map(_markdown, (table_rows(results, chosen), uncertainty_rows(results), cost_rows(results)))
    return "\n".join([first, f"{'; '.join(notes(results, chosen))}.\n", *others])


def _markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    escaped = ([escape(printable(cell), quote=False).replace("|", "\\|") for cell in cells] for cells in lines)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def latex_table(results: Content, chosen: Sequence[str] | None = None) -> str:
    """Return the main table as a LaTeX tabular, which needs no package: corruptions by their usual short names, the
    best of each column in bold; legend and command are comments.
    """
    columns, methods = _columns(results, chosen), results["methods"]
    header = [_latex(_short(name)) for name in ("error in %", *(column.header for column in columns))]
    cells = [list(map(_latex, methods)), *(_latex_column(column, methods) for column in columns)]
    head, *rows = (f"{' & '.join(row)} \\\\" for row in (header, *zip(*cells, strict=True)))
    legend = [*notes(results, chosen), *["bold: the best, without upper bounds"] * (len(methods) > 1)]
    if command := results.get("environment", {}).get("command"):
        legend.append(shlex.join([Path(command[0]).stem.replace("__main__", "remtta"), *command[1:]]))
    lines = [*(f"% {printable(note)}" for note in legend), rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\hline"]
    return "\n".join([*lines, head, r"\hline", *rows, r"\hline", r"\end{tabular}", ""])


def _latex_column(column: Column, methods: Mapping[str, Content]) -> list[str]:
    """Return the cells of a column, the best in bold: those equal in print, if at least two compete."""
    cells = {name: column.cell(content) for name, content in methods.items()}
    numbers = {name: _NUMBER.fullmatch(cell) for name, cell in cells.items() if not _has_labels(name)}
    values = {name: float(number["value"]) for name, number in numbers.items() if number}
    best = column.best(values.values()) if column.best and len(values) > 1 else None
    return [_latex(cell, bold=best is not None and values.get(name) == best) for name, cell in cells.items()]


def _short(header: str) -> str:
    """Return the name of a column as papers write it."""
    words = "+".join(_SHORT.get(part, part.replace("_", " ")) for part in parts_of(header))
    return words[:1].upper() + words[1:]


def _latex(cell: str, *, bold: bool = False) -> str:
    if not (number := _NUMBER.fullmatch(cell)):
        return printable(cell).translate(_ESCAPES)
    text = number["text"].replace("±", r"\pm")
    sign = r"\approx " if cell.startswith(SAME) else ""
    return f"${sign}" + (rf"\mathbf{{{text}}}" if bold else text) + "$"


def plain_table(results: Content, chosen: Sequence[str] | None = None) -> str:
    """Return the main table in aligned columns for a terminal, followed by its legend."""
    header, rows = table_rows(results, chosen)
    return "\n".join([*aligned(zip(header, *rows, strict=True)), *notes(results, chosen)])
