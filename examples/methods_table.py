"""Every method on one corrupted data set: alone, with an anchor, at several rates, and answered by both models.

    remtta corrupt imagenet_val1300/ c/ --severity 3
    python examples/methods_table.py c/ runs/ --model vit_tiny_patch16_224 --checkpoint vit_tiny.safetensors \\
        --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --source-data clean/ tent tent:anchor=auto rem:lr=1e-2,anchor=auto:seed=1

A run is METHOD[:SETTING=VALUE,...][:seed=N]: one continual pass over the domains. The logits of each are kept under
RUNS, as METHOD....npz, so a second call goes on where the first was stopped, and prints a Markdown table of all that
it names: errors in %, and in brackets the domain that is worst against the source and how many are worse. "both" and
"auto" are mixed afterwards from the logits of the same run, by the code behind `--answer`; updates do not depend on it.
"""

from __future__ import annotations

import argparse
import ast
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.errors import UsageError
from remtta.evaluation import open_dataset
from remtta.evaluation.domains import Dataset
from remtta.files import write_atomically
from remtta.guard.evidence import mixture
from remtta.guard.judge import Judge
from remtta.methods.registry import build_method
from remtta.methods.settings import method_config
from remtta.methods.source_data import learn_from_source
from remtta.models.preprocessing import preprocessing_of
from remtta.options import Answer, GuardOptions

_COMMA = re.compile(r",(?![^(]*\))")  # none in brackets, as in mask_ratios=(0,.5)


def parse(run: str) -> tuple[str, dict[str, Any], int]:
    """Method, settings and seed of `METHOD[:SETTING=VALUE,...][:seed=N]`."""
    method, *parts = run.split(":")
    settings: dict[str, Any] = dict(pair.split("=", 1) for part in parts for pair in _COMMA.split(part))
    for name, text in settings.items():
        with suppress(ValueError, SyntaxError):  # text, such as "auto", stays text
            settings[name] = ast.literal_eval(text)
    return method, settings, settings.pop("seed", 0)


def logits_of(run: str, args: argparse.Namespace, dataset: Dataset) -> tuple[Tensor, float]:
    """What a run said of every frame, logits (N, C) in half precision, and the seconds that it took."""
    method_name, settings, seed = parse(run)
    torch.manual_seed(seed)
    model = fresh(args)
    preprocessing = preprocessing_of(model)
    as_they_are = set(dataset.sizes) == {preprocessing.input_size[::-1]}
    preprocessing = replace(preprocessing, crop_pct=1.0) if as_they_are else preprocessing
    transform = preprocessing.transform()
    config = method_config(method_name, {"precision": args.precision, **settings}, batch_size=args.batch_size)
    method = build_method(method_name, model, config)
    if method.objective.needs_source:
        learn_from_source(
            method,
            model,
            args.source_data,
            method=method_name,
            config=config,
            preprocessing=preprocessing,
        )
    said, seconds = [], 0.0
    for number, domain in enumerate(dataset.domains):
        for places in order_of(dataset, number, seed).split(args.batch_size):
            pixels = torch.stack([transform(domain.load(int(place))) for place in places])
            begin = time.perf_counter()
            said.append(method(preprocessing.normalise(pixels)).half())
            seconds += time.perf_counter() - begin
    return torch.cat(said), seconds


def order_of(dataset: Dataset, number: int, seed: int) -> Tensor:
    """The order of a domain's images: the same for every run of a seed."""
    count = len(dataset.domains[number].sources)
    return torch.from_numpy(np.random.default_rng([seed, number]).permutation(count))


def kept(run: str, args: argparse.Namespace, dataset: Dataset) -> tuple[Tensor, float]:
    """The logits and seconds of a run, from its file where there is one."""
    path = Path(args.runs) / f"{run}.npz"
    if not path.exists():
        logits, seconds = logits_of(run, args, dataset)
        path.parent.mkdir(parents=True, exist_ok=True)

        def write(place: Path) -> None:
            with place.open("wb") as file:
                np.savez(file, logits=logits.numpy(), seconds=seconds)

        write_atomically(path, write)
    with np.load(path) as file:
        return torch.from_numpy(file["logits"]), float(file["seconds"])


def answered(adapted: Tensor, source: Tensor, answer: Answer, batch: int) -> Tensor:
    """The classes (N,) that `--answer` gives: what both said, mixed batch by batch."""
    if answer == "adapted":
        return adapted.argmax(1)
    judge = Judge(GuardOptions(action="off", answer=answer))
    classes = []
    for own, other in zip(adapted.float().split(batch), source.float().split(batch), strict=True):
        judge.see(other, own)
        judge.judge(len(own), 0.0)
        classes.append((mixture(own, other, judge.weight) if judge.weight else other).argmax(1))
    return torch.cat(classes)


def fresh(args: argparse.Namespace) -> torch.nn.Module:
    """The source model."""
    return load_model(args.model, checkpoint=args.checkpoint, mean=args.mean, std=args.std)


def table(args: argparse.Namespace, dataset: Dataset) -> None:
    """Print a row per run, as soon as it is done."""
    print("| run | adapted | `both` | `auto` | images/s |\n|---|---|---|---|---|", flush=True)
    sizes = [len(domain.sources) for domain in dataset.domains]
    for run in args.names:
        seed = parse(run)[2]
        labels = torch.cat(
            [torch.from_numpy(d.labels)[order_of(dataset, n, seed)] for n, d in enumerate(dataset.domains)]
        )

        def errors(classes: Tensor, truth: Tensor = labels) -> Tensor:
            """In % of each domain."""
            return torch.stack([100 * part.float().mean() for part in (classes != truth).split(sizes)])

        source, _ = kept(f"source:seed={seed}", args, dataset)
        adapted, seconds = kept(run, args, dataset)
        before = errors(source.argmax(1))
        cells = []
        for answer in ("adapted", "both", "auto"):
            # Batches do not reach across domains, so their lengths are those of the run's.
            found = errors(answered(adapted, source, answer, args.batch_size))
            worse = found - before
            cells.append(f"{found.mean():.1f} ({worse.max():+.1f}, {int((worse > 0).sum())})")
        print(f"| {run} | {' | '.join(cells)} | {len(labels) / seconds:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("runs", help="folder for the logits")
    parser.add_argument("names", nargs="+", metavar="METHOD[:SETTING=VALUE,...][:seed=N]")
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--mean", type=float, nargs=3)
    parser.add_argument("--std", type=float, nargs=3)
    parser.add_argument("--source-data", help="clean images, for the methods that need some")
    parser.add_argument("--domains", help="which, with commas; all that there are without")
    parser.add_argument("--severity", type=int)
    parser.add_argument("--limit", type=int, default=130, help="images per domain")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    num_classes = fresh(args).num_classes
    assert isinstance(num_classes, int)
    try:
        dataset = open_dataset(
            args.root,
            num_classes=num_classes,
            domains=args.domains.split(",") if args.domains else None,
            severities=[args.severity] if args.severity else None,
            limit=args.limit,
        )
        table(args, dataset)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
