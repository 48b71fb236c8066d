"""Make the tables of docs/results.md again, with one command.

    python examples/all_tables.py data/ tables/
    python examples/all_tables.py data/ tables/ --only pacs
    python examples/all_tables.py data/ trial/ --limit 5

DATA holds photographs/ (ImageNet's wnids as folders), others/ (300 clean photographs, for FOA), cifar10/ (test/, and
train/ for the CLIP, which needs remtta[clip]), pacs/ (photo/, art_painting/, cartoon/, sketch/),
vit_tiny_imagenet.safetensors, deit_tiny_imagenet.safetensors, efficientnet_lite0.safetensors and
vit_cifar10.safetensors. tables.toml lists the evaluations. Finished ones in OUT are kept, stopped ones continue. Prints
tables in Markdown; OUT/figures.json has their numbers, commands, seconds and versions, and docs/figures.json is a copy
of it, with which tests compare README and docs/results.md.
--limit N uses N images of each domain in every table, for a trial in another folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parent
LISTED = tomllib.loads((EXAMPLES / "tables.toml").read_text())
TABLES = LISTED["tables"]


def expanded(command: str) -> str:
    """Return a command of tables.toml with its words in braces replaced, except for {data} and {out}."""
    while (longer := command.format(**LISTED["words"], data="{data}", out="{out}")) != command:
        command = longer
    return " ".join(command.split())


def split_first(out: Path) -> None:
    """Link images of fog into domains: 200 to test on, the first others, 60 of common and 200 of other classes."""
    images = sorted(path for path in (out / "photographs_c" / "fog" / "5").rglob("*") if path.is_file())
    images = [images[place] for place in np.random.default_rng(0).permutation(len(images))]
    classes = Counter(image.parent.name for image in images)
    by_class = sorted(images, key=lambda image: (-classes[image.parent.name], image.parent.name))
    common = {image.parent.name for image in by_class[:60]}
    parts = {
        "test": images[:200],
        **{f"first{count}": images[200 : 200 + count] for count in (16, 64, 256, 512)},
        "common_classes": by_class[:60],
        "other_classes": [image for image in images if image.parent.name not in common][:200],
    }
    for name, part in parts.items():
        for image in part:
            link = out / "first_frames" / name / image.parent.name / image.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image.resolve())


def call(words: Sequence[str], *, capture: bool = False) -> str:
    """Run a remtta command, or a script or function here; return what it prints if `capture`."""
    functions: dict[str, Callable[..., None]] = {"split_first": split_first}
    if words[0] in functions:
        functions[words[0]](*map(Path, words[1:]))
        return ""
    program = [str(EXAMPLES / words[0])] if is_script(words[0]) else ["-m", "remtta", words[0]]
    printed = subprocess.PIPE if capture else None
    return subprocess.run([sys.executable, *program, *words[1:]], check=True, stdout=printed, text=True).stdout or ""


def is_script(command: str) -> bool:
    """Return whether a command of tables.toml is of a script here, whose output is the table, not an evaluation's."""
    return command.split()[0].endswith(".py")


def figures_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a table from an evaluation's results.json: by method, in % and percentage points.

    `unseen` is the error on domains that were only tested.
    """
    found = {}
    for name, content in results["methods"].items():
        losses = {domain: 0.0 - gain for domain, gain in content.get("gain_by_domain", {}).items()}
        found[name] = {
            "error": round(content["mean"], 1),
            "error_se": round(content["mean_se"], 1),
            "gain": None if content["gain"] is None else round(content["gain"], 1),
            "gain_se": round(content["gain_se"], 1) if content.get("gain_se") is not None else None,
            "worst": round(max(losses.values()), 1) if losses else None,
            "worst_domain": max(losses, key=lambda domain: losses[domain]) if losses else None,
            "worse": sum(loss > 0 for loss in losses.values()),
            **({"unseen": round(content["unseen"]["mean"], 1)} if "unseen" in content else {}),
            **({"first": first_figures(content["first"])} if "first" in content else {}),
            "passes": round(content["forwards_per_image"] + content["backwards_per_image"], 1),
            "ms": round(1000 / content["timing"]["images_per_s"], 1) if content["timing"]["images_per_s"] else None,
            "mib": round(content["timing"]["peak_memory_bytes"] / 2**20),
            "seconds": round(content["timing"]["seconds"]),
        }
    return found


def first_figures(first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the first images of each condition."""
    gains = first.get("gain_by_domain", {})
    return {
        "error": round(first["mean"], 1),
        "gain": round(first["gain"], 1) if gains else None,
        "worst": round(max(0.0 - gain for gain in gains.values()), 1) if gains else None,
    }


def gain_errors(rows: Iterable[Mapping[str, Any]], frames: int) -> dict[str, float]:
    """Return the standard error of each method's gain in points, clustered by photographs of `frames` frames each."""
    wrong: dict[str, list[bool]] = {}
    for row in rows:
        wrong.setdefault(row["method"], []).append(row["class"] != row["label_true"])
    found = {}
    for name, errors in wrong.items():
        gains = np.subtract(wrong["source"], errors, dtype=float).reshape(-1, frames).mean(1)
        found[name] = round(100 * float(gains.std(ddof=1)) / len(gains) ** 0.5, 1)
    return found


def markdown(table: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    """Return a table of all cases, or the tables that scripts printed, followed by the command of each."""
    if all("printed" in entry for entry in cases.values()):
        parts = [f"{case}:\n\n{entry['printed']}\n`{entry['command']}`\n" for case, entry in cases.items()]
        return "\n".join([f"### {table['title']}\n", *parts])
    header = ["", "method", "error", "gain", "worst domain, and how many are worse", "first 50: gain, worst"]
    header += ["passes", "ms per frame"]
    lines = [f"### {table['title']}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for case, entry in cases.items():
        for number, (name, row) in enumerate(entry["methods"].items()):
            unseen = f", unseen {row['unseen']:.1f}" if "unseen" in row else ""
            cells = [case if number == 0 else "", f"`{name}`", f"{row['error']:.1f} ± {row['error_se']:.1f}{unseen}"]
            gained = row["gain"] is not None and row["worst"] is not None
            cells.append(f"{row['gain']:+.1f} ± {row['gain_se']:.1f}" if gained else "")
            cells.append(f"{row['worst']:+.1f} {row['worst_domain']}, {row['worse']}" if gained else "")
            first = row.get("first", {"gain": None})
            cells.append(f"{first['gain']:+.1f}, {first['worst']:+.1f}" if first["gain"] is not None else "")
            cells += [str(row.get(name) or "") for name in ("passes", "ms")]
            lines.append(f"| {' | '.join(cells)} |")
    notes = [
        f"*{case}*: {entry['images']} images, {entry['seconds'] / 60:.0f} min, {entry['date']}, remtta "
        f"{entry['version']}: `{entry['command']}`"
        for case, entry in cases.items()
    ]
    return "\n".join([*lines, "", *notes, ""])


class Maker:
    """Runs the missing evaluations.

    Args:
        data: Folder of images and weights.
        out: Folder for all results.
        limit: Images of each domain; None for all.
    """

    def __init__(self, data: Path, out: Path, limit: int | None) -> None:
        self._places = {"data": str(data), "out": str(out)}
        self._out, self._limit, self._path = out, limit, out / "figures.json"
        self._figures = json.loads(self._path.read_text()) if self._path.exists() else {}

    def make(self, name: str) -> str:
        """Make a table and return it as Markdown."""
        table = TABLES[name]
        for need in table["needs"]:
            made = expanded(LISTED["inputs"][need])
            if made.startswith("corrupt") or not (self._out / need).exists():  # a tree keeps what it has
                call(self._words(made))
        frames = table.get("frames") if self._limit is None else None  # a trial has no whole photographs
        for case, arguments in table["cases"].items():
            self._evaluate(name, case, expanded(arguments), frames)
        return markdown(table, {case: self._figures[name][case] for case in table["cases"]})

    def _words(self, command: str) -> list[str]:
        return [word.format(**self._places) for word in command.split()]

    def _evaluate(self, name: str, case: str, arguments: str, frames: int | None) -> None:
        """Run an evaluation or a script unless it is finished with these arguments; store its figures."""
        given = arguments if is_script(arguments) else f"eval {arguments}"
        given += "" if self._limit is None else f" --limit {self._limit}"
        command = f"python examples/{given}" if is_script(given) else f"remtta {given}"
        entry = self._figures.setdefault(name, {}).get(case, {})
        if entry.get("command") == command:
            return
        folder, began = self._out / name / case.replace(", ", "_").replace(" ", "_"), time.monotonic()
        if is_script(given):
            made: dict[str, Any] = {"version": version("remtta"), "printed": call(self._words(given), capture=True)}
        else:
            made = self._figures_of(self._words(given), folder, frames)
        self._figures[name][case] = {
            "command": command,
            "seconds": round(time.monotonic() - began),
            "date": time.strftime("%Y-%m-%d"),
            **made,
        }
        self._path.write_text(json.dumps(self._figures, indent=1))

    @staticmethod
    def _figures_of(words: Sequence[str], folder: Path, frames: int | None) -> dict[str, Any]:
        """Run or resume an evaluation, and return its figures."""
        call([*words, "--output", str(folder), "--resume", "--no-plots"])
        results = json.loads((folder / "results.json").read_text())
        methods = figures_of(results)
        if frames:
            with open(folder / "predictions.jsonl") as rows:
                for method, error in gain_errors(map(json.loads, rows), frames).items():
                    methods[method]["gain_se"] = error
        return {
            "images": sum(domain["images"] for domain in results["settings"]["data"]["domains"]),
            "version": results["environment"]["remtta"],
            "device": results["environment"]["device_name"],
            "methods": methods,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=TABLES, metavar="NAME", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--limit", type=int, help="images of each domain")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    maker = Maker(args.data, args.out, args.limit)
    for name in args.only or TABLES:
        print(maker.make(name), flush=True)


if __name__ == "__main__":
    main()
