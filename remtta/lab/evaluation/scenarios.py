"""The order in which domains are visited, resets between them, and a stream that does not wait for updates."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from remtta.errors import UsageError, listed
from remtta.lab.corruptions.parameters import SEVERITIES
from remtta.lab.evaluation.domains import Dataset, Domain
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.orders import NEXT_CLASSES, NUM_CLASSES, ORDERS
from remtta.lab.evaluation.trial_writer import TrialProgress
from remtta.pipeline.pipeline import BETWEEN_UPDATES, Pipeline
from remtta.runs.loop import OUT_OF_TIME, BatchResult, LearningPolicy
from remtta.streams.batches import Batch

Phase = Literal["adapt", "unseen", "revisit"]
GRADUAL_SEVERITIES = (*SEVERITIES, *reversed(SEVERITIES[:-1]))
_RECURRING_VISITS = 20  # per domain, in PeTTA's protocol of recurring domains (Hoang et al., NeurIPS 2024)
_DOMAIN_SEED, _MIXED_SEED, _CLASS_SEED = 1, 2, 3
_STEP = 50  # images of a condition in a walk
_SHOWN = 5
_TIMED_BATCHES = 3  # timed per side of the measured cost ratio

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Visit:
    """A stretch of images without a reset in between."""

    items: np.ndarray  # shape (n, 2): domain index and position in the domain
    reset: bool = False  # restore the source weights first
    phase: Phase = "adapt"  # "adapt"; or "unseen" or "revisit" to test without updates


def plan_visits(dataset: Dataset, options: EvalOptions, seed: int) -> list[Visit]:
    """Return the visits of one trial; raise UsageError if an unseen domain is not in the dataset, all domains are
    unseen, the gradual scenario lacks severities, or an order of few classes lacks images.
    """
    scenario, names = options.scenario, [domain.name for domain in dataset.domains]
    if unknown := [name for name in options.unseen if name not in names]:
        known = ", ".join(dict.fromkeys(names))
        raise UsageError(f"--unseen {', '.join(unknown)}: not among the domains ({known}); include it in --domains")
    seen = [number for number, name in enumerate(names) if name not in options.unseen]
    unseen = [number for number, name in enumerate(names) if name in options.unseen]
    if not seen:
        raise UsageError("--unseen leaves no domain to adapt to")

    classes = _stream_classes(dataset, options, seed)
    step = NUM_CLASSES[options.order] if options.order in NEXT_CLASSES else 0

    def visit(number: int, repetition: int = 0, phase: Phase = "adapt") -> Visit:
        chosen = np.roll(classes, -number * step)
        positions = _image_order(dataset.domains[number], options, chosen, seed, repetition)
        items = np.stack([np.full_like(positions, number), positions], axis=1)
        return Visit(items, reset=scenario == "episodic" and phase == "adapt", phase=phase)

    order = _gradual_order(dataset.domains, seen) if scenario == "gradual" else seen
    rounds = options.visits or _RECURRING_VISITS if scenario == "recurring" else 1
    visits = [visit(number, repetition) for repetition in range(rounds) for number in order]
    if scenario in ("mixed", "walk"):
        rng, items = np.random.default_rng([seed, _MIXED_SEED]), [visit.items for visit in visits]
        mixed = scenario == "mixed"
        visits = [Visit(rng.permutation(np.concatenate(items)) if mixed else _walk(dataset.domains, items, rng))]
    visits += [visit(number, phase="unseen") for number in unseen]
    return visits + [visit(number, phase="revisit") for number in seen if options.revisit]


def _stream_classes(dataset: Dataset, options: EvalOptions, seed: int) -> np.ndarray:
    """Return the classes that every domain has, in the order in which a stream of few classes takes them: a random one,
    which each seed begins with another class.
    """
    every = set.intersection(*(set(domain.labels.tolist()) for domain in dataset.domains))
    if len(every) < (needed := NUM_CLASSES.get(options.order or "", 0)):
        raise UsageError(
            f"--order {options.order} needs {needed} of the classes to have images in every domain, and {len(every)} "
            "have; choose another order, or --domains"
        )
    return np.roll(np.random.default_rng(_CLASS_SEED).permutation(sorted(every)), -(seed % max(1, len(every))))


def _image_order(domain: Domain, options: EvalOptions, classes: np.ndarray, seed: int, repetition: int) -> np.ndarray:
    """Return the positions of a domain's images in the order in which they come."""
    rng = np.random.default_rng([seed, _DOMAIN_SEED, *domain.title.encode(), *([repetition] if repetition else [])])
    if options.scenario == "label-shift":
        if options.dirichlet is not None:
            return dirichlet_order(domain.labels, options.dirichlet, rng)
        return imbalanced_order(domain.labels, options.imbalance, rng)
    if order := ORDERS.get(options.order or ""):
        return order(domain.labels, classes, rng)
    return np.arange(len(domain.labels)) if options.order == "stored" else rng.permutation(len(domain.labels))


def _walk(domains: Sequence[Domain], visits: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return the items of all visits, each once, in steps of 50 images of a condition.

    Corruptions come in random order, again and again, each time with severities rising and falling.
    """
    by_name: dict[str, list[list[np.ndarray]]] = {}  # the steps at each severity
    for items in sorted(visits, key=lambda items: domains[items[0, 0]].severity or 0):
        steps = [items[start : start + _STEP] for start in range(0, len(items), _STEP)]
        by_name.setdefault(domains[items[0, 0]].name, []).append(steps)
    passages = []
    for name in sorted(by_name):
        for number in range(0, max(map(len, by_name[name])), 2):
            up = [steps[number : number + 1] for steps in by_name[name]]
            down = [steps[number + 1 : number + 2] for steps in reversed(by_name[name])]
            passages.append([step for steps in up + down for step in steps])
    return np.concatenate([step for number in rng.permutation(len(passages)) for step in passages[number]])


def _gradual_order(domains: Sequence[Domain], numbers: Sequence[int]) -> list[int]:
    """Return each corruption's domains with severities rising to the worst and falling again."""
    names = list(dict.fromkeys(domains[number].name for number in numbers))
    by_level = {(domains[number].name, domains[number].severity): number for number in numbers}
    if missing := [f"{name} {level}" for name in names for level in SEVERITIES if (name, level) not in by_level]:
        raise UsageError(
            "the gradual scenario visits severities 1 to 5 of every corruption, and these are not there: "
            f"{listed(missing, _SHOWN)}; choose another scenario"
        )
    return [by_level[name, severity] for name in names for severity in GRADUAL_SEVERITIES]


def imbalanced_order(labels: np.ndarray, ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Return an order, as positions (n,), in which one class after the other is overrepresented.

    There are as many stretches as classes, in random order. In each stretch its class is `ratio` times as likely as
    any other; 1 is a plain shuffle, infinity sorts by class. Every image occurs once.

    Source: the online imbalanced label shift of SAR (Niu et al., ICLR 2023), drawn without replacement.
    """
    classes = rng.permutation(np.unique(labels))
    stretches = np.argsort(classes)[np.searchsorted(np.sort(classes), labels)]
    if len(classes) > 1:
        share = 1.0 if np.isinf(ratio) else ratio / (ratio + len(classes) - 1)
        is_moved = rng.random(len(labels)) >= share
        others = rng.integers(len(classes) - 1, size=len(labels))
        stretches = np.where(is_moved, others + (others >= stretches), stretches)
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(stretches[shuffled], kind="stable")]


def dirichlet_order(labels: np.ndarray, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """Return an order, as positions (n,), with each class in bursts, drawn from a Dirichlet distribution over time.

    Time has as many slots as there are classes. Each class's images are divided among the slots by a draw for the
    class; within a slot the classes follow one another. Small concentrations (0.01) make one burst per class, large
    ones a burst of each class in each slot, all of about the same length.

    Source: the temporally correlated streams of NOTE (Gong et al., NeurIPS 2022), whose code also balances the slots.
    """
    classes = np.unique(labels)
    slots: list[list[np.ndarray]] = [[] for _ in classes]
    for number in classes:
        positions = rng.permutation(np.flatnonzero(labels == number))
        shares = rng.dirichlet(np.full(len(classes), concentration))
        ends = np.round(np.cumsum(shares)[:-1] * len(positions)).astype(int)
        for slot, part in zip(slots, np.split(positions, ends), strict=True):
            slot.append(part)
    return np.concatenate([slot[number] for slot in slots for number in rng.permutation(len(slot))])


class TimeConstrainedPolicy(LearningPolicy):
    """Learns from a batch, then skips the updates of as many batches as would have arrived meanwhile.

    Args:
        position: Progress of the run; stores the ratio and the number of batches still to skip.
        cost_ratio: Time of an adapting batch divided by that of a plain forward pass; measured if None.

    Source: Alfarra et al., "Evaluation of Test-Time Adaptation Under Computational Time Constraints", ICML 2024.
    """

    def __init__(self, pipeline: Pipeline, position: TrialProgress, cost_ratio: float | None) -> None:
        self._pipeline, self._position, self._given = pipeline, position, cost_ratio
        self._next: tuple[float, int] | None = None

    def excluded(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        """Return all frames of a batch that arrives while an update is still running."""
        labels = None if batch.labels is None else batch.labels.to(pixels.device)
        ratio = self._position.cost_ratio or self._given or measure_cost_ratio(self._pipeline, pixels, labels)
        if self._position.skip:
            self._next = ratio, self._position.skip - 1
            return {frame.index: OUT_OF_TIME for frame in batch.readable}
        self._next = ratio, math.ceil(ratio) - 1
        return {}

    def finished(self, result: BatchResult) -> None:
        """Store how many batches are still to be skipped."""
        if self._next is not None:
            self._position.cost_ratio, skip = self._next
            self._position.skip = 0 if BETWEEN_UPDATES in result.excluded.values() else skip
            self._next = None


def measure_cost_ratio(pipeline: Pipeline, pixels: Tensor, labels: Tensor | None) -> float:
    """Measure the time of an adapting batch, with the source model's pass if it takes part, divided by that of a plain
    forward pass; the adapter's state is restored.
    """
    state = pipeline.state_dict()
    times: dict[str, list[float]] = {"adapt": [], "base": []}
    for _ in range(_TIMED_BATCHES):
        for name in times:
            started = time.perf_counter()
            if name == "adapt":
                out = pipeline(pixels, labels)
            else:
                out = pipeline.method.predict(pipeline.method.model.transform(pixels))
            out.cpu()  # waits for the device
            times[name].append(time.perf_counter() - started)
    pipeline.load_state_dict(state)
    pipeline.events()  # of the batches undone
    ratio = max(1.0, min(times["adapt"]) / min(times["base"]))
    _log.info("an update costs %.2f forward passes", ratio)
    return ratio
