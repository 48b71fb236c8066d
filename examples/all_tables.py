"""Make the tables of docs/results.md again, with one command.

    python examples/all_tables.py data/ tables/
    python examples/all_tables.py data/ tables/ --only pacs
    python examples/all_tables.py data/ trial/ --limit 5

DATA holds photographs/ (ImageNet's wnids as folders), others/ (300 clean photographs, for FOA), cifar10/test/, pacs/
(photo/, art_painting/, cartoon/, sketch/), vit_tiny_imagenet.safetensors, deit_tiny_imagenet.safetensors,
efficientnet_lite0.safetensors and vit_cifar10.safetensors. Finished evaluations in OUT are kept, stopped ones continue.
Prints tables in Markdown; OUT/figures.json has its numbers, commands, seconds and versions; docs/figures.json is a
copy of it, with which tests compare README and docs/results.md.
--limit N uses N images of each domain in every table, for a trial in another folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

EXAMPLES = Path(__file__).parent
SHORT = "source,rem,fast,light,remtta"
PUBLISHED = f"{SHORT},tent,sar,roid"
TUNED = "croid3=roid,lt=light --set croid3.centre=true --set croid3.lr=6e-4 --set lt.adapt_every=1"
ANSWERS = "source,fast,light,remtta"
CENTRED = (
    f"{ANSWERS},tent,ctent=tent,sar,csar=sar,deyo,cdeyo=deyo,roid,croid=roid,{TUNED} "
    "--set ctent.centre=true --set csar.centre=true --set cdeyo.centre=true --set croid.centre=true"
)
FOA = "source,foa --source-data {data}/others"
CONVOLUTIONAL = f"{SHORT},norm,gradcam=rem,tent,sar,roid --set gradcam.masking=gradcam"
EVERY = f"{ANSWERS},fourth=remtta,eighth=remtta --set fourth.adapt_every=4 --set eighth.adapt_every=8"
AXES = "source,fast,remtta,rem,sar,roid"
FEW = (16, 64, 256, 512)
SMOOTHED = "source,fast,remtta,remtta+smooth"

_HALF = "--mean 0.5 --std 0.5"
_VIT, _DEIT = "--model vit_tiny_patch16_224", "--model deit_tiny_patch16_224"
_LITE = "--model tf_efficientnet_lite0"
_CIFAR = (
    "--model vit_tiny_patch16_224 --checkpoint {data}/vit_cifar10.safetensors --num-classes 10 --crop-pct 1.0 "
    f"{_HALF} --model-kwargs img_size=32 --model-kwargs patch_size=4 --model-kwargs depth=6"
)
MODELS = {
    "vit": f"{_VIT} --checkpoint {{data}}/vit_tiny_imagenet.safetensors {_HALF}",
    "deit": f"{_DEIT} --checkpoint {{data}}/deit_tiny_imagenet.safetensors",
    "lite": f"{_LITE} --checkpoint {{data}}/efficientnet_lite0.safetensors {_HALF}",
    "cifar": _CIFAR,
}
PROBES = {
    "vit": f"{_VIT} --checkpoint {{out}}/pacs_vit.safetensors --num-classes 7 {_HALF}",
    "deit": f"{_DEIT} --checkpoint {{out}}/pacs_deit.safetensors --num-classes 7",
    "lite": f"{_LITE} --checkpoint {{out}}/pacs_lite.safetensors --num-classes 7 {_HALF}",
}


def split_first(out: Path) -> None:
    """Link images of fog into domains: 200 to test on, the first others, 60 of common and 200 of other classes."""
    images = sorted(path for path in (out / "photographs_c" / "fog" / "5").rglob("*") if path.is_file())
    images = [images[place] for place in np.random.default_rng(0).permutation(len(images))]
    classes = Counter(image.parent.name for image in images)
    by_class = sorted(images, key=lambda image: (-classes[image.parent.name], image.parent.name))
    common = {image.parent.name for image in by_class[:60]}
    parts = {
        "test": images[:200],
        **{f"first{count}": images[200 : 200 + count] for count in FEW},
        "common_classes": by_class[:60],
        "other_classes": [image for image in images if image.parent.name not in common][:200],
    }
    for name, part in parts.items():
        for image in part:
            link = out / "first_frames" / name / image.parent.name / image.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image.resolve())


MADE: dict[str, str | Callable[[Path], None]] = {
    "photographs_c": "corrupt {data}/photographs {out}/photographs_c --severity 3,5",
    "photographs_2c": "corrupt {data}/photographs {out}/photographs_2c --severity 3 "
    "-c fog+gaussian_noise,snow+motion_blur,contrast+jpeg_compression",
    "cifar10_c": "corrupt {data}/cifar10/test {out}/cifar10_c --severity 5 --limit 1000",
    "first_frames": split_first,
    "video": "make_walk.py {data}/photographs {out}/video --severity 4 --pan 25 --images 3000",
    **{
        f"pacs_{name}.safetensors": f"linear_probe.py {{data}}/pacs/photo {{out}}/pacs_{name}.safetensors {options}"
        for name, options in MODELS.items()
        if name in PROBES
    },
}
"""The inputs of evaluations by their names in OUT, and the remtta command, script here or function that makes each."""


class Table(NamedTuple):
    """The evaluations of one table.

    Attributes:
        title: Its heading.
        cases: Arguments of `remtta eval` for each part of the table.
        needs: Names in `MADE`.
    """

    title: str
    cases: Mapping[str, str]
    needs: Sequence[str]


def _on_corruptions(name: str, severity: int, batch: int, methods: str, more: str = "--limit 100") -> str:
    return (
        f"{{out}}/photographs_c --continual --severity {severity} --batch-size {batch} --methods {methods} "
        f"{MODELS[name]} {more}"
    )


def _on_pacs(name: str, methods: str, scenario: str = "continual") -> str:
    domains = "--domains art_painting,cartoon,sketch --batch-size 50"
    return f"{{data}}/pacs --{scenario} {domains} --methods {methods} {PROBES[name]} --limit 210"


def _after(first: str, then: str) -> str:
    domains = f"--domains {first},{then} --unseen {then} --batch-size 16"
    return f"{{out}}/first_frames {domains} --methods {AXES} {MODELS['vit']}"


_SEVERITY_5 = "{out}/photographs_c --severity 5"
_SIX = "gaussian_noise,defocus_blur,fog,brightness,contrast,jpeg_compression"

TABLES = {
    "imagenet": Table(
        "ImageNet photographs, fifteen corruptions, 650 of each",
        {
            f"{name}, severity {level}": _on_corruptions(name, level, 50, SHORT, "--limit 650")
            for name in ("vit", "deit")
            for level in (3, 5)
        },
        ["photographs_c"],
    ),
    "methods": Table(
        "Published methods, centred and not, fifteen corruptions",
        {
            "vit, severity 5": _on_corruptions("vit", 5, 50, CENTRED, "--limit 200"),
            **{
                f"{name}, severity {level}": _on_corruptions(name, level, 50, f"{ANSWERS},{TUNED}", "--limit 200")
                for name, level in (("vit", 3), ("deit", 3), ("deit", 5))
            },
            "FOA, vit, severity 5": _on_corruptions("vit", 5, 50, FOA, "--limit 200"),
        },
        ["photographs_c"],
    ),
    "every": Table(
        "Two forward passes: light, and remtta on every N-th batch, severity 5",
        {f"{name}, batch 20": _on_corruptions(name, 5, 20, EVERY, "--limit 200") for name in ("vit", "deit")},
        ["photographs_c"],
    ),
    "convolutional": Table(
        "EfficientNet-Lite0, fifteen corruptions",
        {
            **{f"severity {level}": _on_corruptions("lite", level, 20, CONVOLUTIONAL) for level in (3, 5)},
            **{
                f"batch {size}": _on_corruptions(
                    "lite", 5, size, "source,norm,fast,light,remtta", f"--domains {_SIX} --limit 100"
                )
                for size in (1, 4, 20, 50)
            },
        },
        ["photographs_c"],
    ),
    "pacs": Table(
        "PACS: a head on photographs; paintings, cartoons and sketches, in a row and each alone",
        {
            "vit": _on_pacs("vit", PUBLISHED),
            "deit": _on_pacs("deit", SHORT),
            "lite": _on_pacs("lite", f"{SHORT},norm,tent"),
            "vit, each alone": _on_pacs("vit", PUBLISHED, "episodic"),
            "deit, each alone": _on_pacs("deit", SHORT, "episodic"),
            "lite, each alone": _on_pacs("lite", "source,norm,tent,fast,light,remtta", "episodic"),
        },
        [f"pacs_{name}.safetensors" for name in PROBES],
    ),
    "video": Table(
        "Photographs panned for 25 frames each, conditions that set in gradually",
        {
            f"batch {size}": f"{{out}}/video --batch-size {size} --methods {SMOOTHED} {MODELS['vit']}"
            for size in (1, 20)
        },
        ["video"],
    ),
    "deployment": Table(
        "Axes of deployment, ViT-Ti",
        {
            "two corruptions at once": f"{{out}}/photographs_2c --continual --severity 3 --methods {AXES} "
            f"{MODELS['vit']} --limit 200",
            "shifts that come back": f"{_SEVERITY_5} --domains gaussian_noise,fog,jpeg_compression "
            f"--scenario recurring --visits 3 --methods {AXES} {MODELS['vit']} --limit 100",
            "deadlines": f"{_SEVERITY_5} --domains {_SIX} --scenario time-constrained --batch-size 20 --methods {AXES} "
            f"{MODELS['vit']} --limit 100",
        },
        ["photographs_c", "photographs_2c"],
    ),
    "few": Table(
        "Learning from the first frames only, ViT-Ti, fog at severity 5",
        {
            **{f"{count} frames": _after(f"first{count}", "test") for count in FEW},
            "60 frames of other classes": _after("common_classes", "other_classes"),
        },
        ["photographs_c", "first_frames"],
    ),
    "cifar10": Table(
        "A small ViT on CIFAR-10, fifteen corruptions at severity 5",
        {
            "1,000 images of each": "{out}/cifar10_c --continual --batch-size 50 --limit 1000 "
            f"--methods {PUBLISHED},eta,deyo {MODELS['cifar']}"
        },
        ["cifar10_c"],
    ),
}


def call(words: Sequence[str]) -> None:
    """Run a remtta command, or a script in this folder."""
    program = [str(EXAMPLES / words[0])] if words[0].endswith(".py") else ["-m", "remtta", words[0]]
    subprocess.run([sys.executable, *program, *words[1:]], check=True)


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
            "seconds": round(content["timing"]["seconds"]),
        }
    return found


def markdown(table: Table, cases: Mapping[str, Any]) -> str:
    """Return a table of all cases, followed by the command of each."""
    lines = [
        f"### {table.title}",
        "",
        "| | method | error | gain | worst domain, and how many are worse |",
        "|---|---|---|---|---|",
    ]
    for case, entry in cases.items():
        for number, (name, row) in enumerate(entry["methods"].items()):
            unseen = f", unseen {row['unseen']:.1f}" if "unseen" in row else ""
            cells = [case if number == 0 else "", f"`{name}`", f"{row['error']:.1f} ± {row['error_se']:.1f}{unseen}"]
            gained = row["gain"] is not None and row["worst"] is not None
            cells.append(f"{row['gain']:+.1f} ± {row['gain_se']:.1f}" if gained else "")
            cells.append(f"{row['worst']:+.1f} {row['worst_domain']}, {row['worse']}" if gained else "")
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

    def make(self, name: str, table: Table) -> str:
        """Make a table and return it as Markdown."""
        for need in table.needs:
            self._prepare(need)
        for case, arguments in table.cases.items():
            self._evaluate(name, case, arguments)
        return markdown(table, {case: self._figures[name][case] for case in table.cases})

    def _words(self, command: str) -> list[str]:
        return [word.format(**self._places) for word in shlex.split(command)]

    def _prepare(self, need: str) -> None:
        made = MADE[need]
        if callable(made):
            if not (self._out / need).exists():
                made(self._out)
        elif made.startswith("corrupt") or not (self._out / need).exists():  # a tree keeps what it has
            call(self._words(made))

    def _evaluate(self, name: str, case: str, arguments: str) -> None:
        """Run an evaluation unless it is finished with these arguments; store its figures."""
        limit = [] if self._limit is None else ["--limit", str(self._limit)]
        words, given = ["eval", *self._words(arguments), *limit], [*shlex.split(arguments), *limit]
        command = shlex.join(["remtta", "eval", *given]).replace("'", "")
        entry = self._figures.setdefault(name, {}).get(case, {})
        if entry.get("command") == command:
            return
        folder, began = self._out / name / case.replace(", ", "_").replace(" ", "_"), time.monotonic()
        call([*words, "--output", str(folder), "--resume", "--no-plots"])
        results = json.loads((folder / "results.json").read_text())
        self._figures[name][case] = {
            "command": command,
            "images": sum(domain["images"] for domain in results["settings"]["data"]["domains"]),
            "seconds": round(time.monotonic() - began),
            "date": time.strftime("%Y-%m-%d"),
            "version": results["environment"]["remtta"],
            "methods": figures_of(results),
        }
        self._path.write_text(json.dumps(self._figures, indent=1))


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
        print(maker.make(name, TABLES[name]), flush=True)


if __name__ == "__main__":
    main()
