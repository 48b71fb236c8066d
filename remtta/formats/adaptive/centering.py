"""The centered logits of `remtta.pipeline.centering` as an ONNX graph.

It computes in float32, as every engine can. So the state holds variances instead of mean squares, and certainties
beyond that of equal probabilities: their differences would be rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from remtta.formats.adaptive.norms import Moments
from remtta.formats.adaptive.operators import Nodes, Value
from remtta.pipeline import temperature
from remtta.pipeline.few_classes import (
    CLASS_LOGIT,
    COMMON_RANGE,
    DOUBT_RANGE,
    EVIDENCE_HALF_LIFE,
    HALF_LIFE,
    LOST_RANGE,
    MAX_LEFT,
    VIEW_EVERY,
)

NUMBERS = (
    *("model", "images", "since_view"),  # whose state it is; images that counted; since the last view, below VIEW_EVERY
    *("weight", "view_weight", "evidence_weight"),  # of the running means
    "spread",  # variance of logits less their mean over classes
    *("variance", "covariance"),  # of plain logits; of these and the shuffled views' logits
    *("certainty", "centered_certainty"),  # p . p and c . c of few_classes.py, minus 1 / C
    *("source_certainty", "rest_certainty"),  # r . r and q . q, likewise
    "agreement",  # of the predictions before and after centering
    "log_temperature",  # natural logarithm, as sought
)
"""Numbers at the beginning of a state."""

VECTORS = ("logits", "probabilities", "plain", "shuffled")
"""Running means (C,) behind them: z, p, v and w of few_classes.py."""

NORMS = ("norm_weight", "adapted", "norm_means", "norm_variances")
"""Behind them, of a model with batch norms: its `Moments`, and the running mean of the adapted model's logits (C,)."""

STATUS = ("offset_norm", "class_fraction_kept", "temperature", "agreement", "images")
"""Numbers of a status."""

_TINY = 1e-9  # bound on divisors
_INFINITE = 3e38

State = Mapping[str, Value]


def read_state(op: Nodes, state: Value, model: float, sizes: Mapping[str, int]) -> State:
    """Return the values in a state; that of another model counts as zero, the beginning of a stream."""
    own = op("Equal", op("Slice", state, (0,), (1,)), [model])
    return dict(zip(sizes, op.split(op("Where", own, state, [0.0]), [*sizes.values()]), strict=True))


def state_sizes(num_classes: int, num_channels: int) -> dict[str, int]:
    """Return the lengths of the values in a state, in their order, for this many channels of batch norms."""
    sizes = dict.fromkeys(NUMBERS, 1) | dict.fromkeys(VECTORS, num_classes)
    return sizes | (dict(zip(NORMS, (1, num_classes, num_channels, num_channels), strict=True)) if num_channels else {})


def are_finite(op: Nodes, values: Value, *axes: int) -> Value:
    """Return whether all values along axes are finite."""
    return op("Less", op("Abs", op.sum(values, *axes)), _INFINITE)


def due_for_view(op: Nodes, finite: Value, state: State) -> Value:
    """Return the indices (K,) of the images that are also seen with shuffled patches, among finite ones (B,)."""
    position = op("CumSum", op("Cast", finite, to=TensorProto.FLOAT), np.int64(0), exclusive=1) + state["since_view"]
    due = op("Equal", op("Mod", position, float(VIEW_EVERY), fmod=1), 0.0)
    return op("Reshape", op("NonZero", op("And", due, finite)), (-1,))


def center(
    op: Nodes,
    state: State,
    model: float,
    logits: Value,
    views: tuple[Value, Value],
    finite: Value,
    num_classes: int,
    adapted: tuple[Value, Moments] | None,
) -> tuple[Value, Value, Value]:
    """Return centered logits (B, C), the new state, and the status.

    Args:
        model: The number of the model, for the state.
        logits: Raw, shape (B, C).
        views: Indices (K,) of the images also seen with shuffled patches, and the logits (K, C) of these views.
        finite: Which images are finite, shape (B,).
        adapted: Raw logits (B, C) with recent statistics, for an ensemble with `logits`, and the new statistics.
    """
    finite = op("And", finite, are_finite(op, logits, 1))
    if adapted:
        finite = op("And", finite, are_finite(op, adapted[0], 1))
    counted = op("Cast", finite, to=TensorProto.FLOAT)
    count = op.sum(counted, 0, keepdims=True)
    z = op("Where", op("Unsqueeze", finite, (1,)), logits, 0.0)
    new: dict[str, Value] = {"model": op.value([model]), "images": state["images"] + count}
    new["since_view"] = op("Mod", state["since_view"] + count, float(VIEW_EVERY), fmod=1)

    means = _RunningMean(op, HALF_LIFE, state["weight"], counted)
    new["weight"], new["logits"] = means.weight, means.add(state["logits"], z)
    keep = 0.5 ** (1 / HALF_LIFE)
    inverse_ess = (2.0 / op("Max", means.weight, _TINY) - (1 - keep)) / (1 + keep)
    known = op("Clip", 1.0 - inverse_ess, 0.0, 1.0)

    new |= _see_views(op, state, z, finite, *views)
    evidence = _RunningMean(op, EVIDENCE_HALF_LIFE, state["evidence_weight"], counted)
    new["evidence_weight"] = evidence.weight
    fraction, without_classes = _find_class_part(op, state, new, z, known, (means, evidence), num_classes)
    offset = known * (new["logits"] + fraction * (without_classes - new["logits"]))
    before, after = z, z - offset
    predicted = logits - offset
    if adapted:
        means_of_adapted = means.add(state["adapted"], a := op("Where", op("Unsqueeze", finite, (1,)), adapted[0], 0.0))
        offset = known * (means_of_adapted + fraction * (without_classes - means_of_adapted))
        before, after = after, a - offset
        predicted = _mixture(op, predicted, adapted[0] - offset)
        new |= dict(zip(NORMS, (adapted[1].weight, means_of_adapted, *adapted[1][1:]), strict=True))

    same = op("Equal", *(op("ArgMax", each, axis=1, keepdims=0) for each in (before, after)))
    new["agreement"] = evidence.add(state["agreement"], op("Cast", same, to=TensorProto.FLOAT))
    models = (before, after) if adapted else None
    finite_predicted = op("Where", op("Unsqueeze", finite, (1,)), predicted, 0.0)
    log, share = state["log_temperature"], temperature.share_of(num_classes)
    new["log_temperature"] = _log_temperature(op, log, share, z, models, finite_predicted, counted)
    divisor = op("Exp", op("Where", op("Greater", log, 0.0), log, log * share))
    norm = op("Sqrt", op.sum(offset * offset, 0, keepdims=True))
    status = (norm, fraction, divisor, new["agreement"], new["images"])
    old_state, new_state = (op("Concat", *(each[name] for name in state), axis=0) for each in (state, new))
    next_state = op("Where", op("Greater", count, 0.0), new_state, old_state)  # bit for bit, if no image counted
    return predicted / divisor, next_state, op("Concat", *status, axis=0)


def _find_class_part(
    op: Nodes,
    state: State,
    new: dict[str, Value],
    z: Value,
    known: Value,
    means: tuple[_RunningMean, _RunningMean],
    num_classes: int,
) -> tuple[Value, Value]:
    """Return the fraction of the shown classes' part that is kept (1,), and the mean logits without this part (C,).

    As `LogitCentering._update_class_part`; adds the running means that it needs to the new state.

    Args:
        z: Raw logits of finite images, shape (B, C).
        known: One minus the inverse effective sample size, shape (1,).
        means: Of logits, and of the certainties that are evidence of few classes.
    """
    recent, evidence = means

    def certainty(logits: Value) -> Value:
        beyond = op("Softmax", logits, axis=-1) - 1 / num_classes
        return op.sum(beyond * beyond, 1)

    shift = _find_shift(op, new, num_classes)
    new["probabilities"] = recent.add(state["probabilities"], op("Softmax", z - shift, axis=-1))
    new["certainty"] = evidence.add(state["certainty"], certainty(z - shift))
    new["centered_certainty"] = evidence.add(state["centered_certainty"], certainty(z - known * new["logits"]))
    low, high = LOST_RANGE
    few = (1.0 - new["centered_certainty"] / op("Max", new["certainty"], _TINY) - low) / (high - low)
    fraction = op("Clip", few, 0.0, 1.0) * op("Clip", evidence.weight, 0.0, 1.0)

    mean, beyond = (_less_mean(op, each, num_classes) for each in (state["logits"], z))
    new["spread"] = recent.add_covariance(state["spread"], (mean, mean), (beyond, beyond))
    class_part = (new["probabilities"] - 1 / num_classes) * CLASS_LOGIT
    rest = new["logits"] * (1.0 - _find_unknown(op, new, shift, num_classes)) - class_part

    new["source_certainty"] = recent.add(state["source_certainty"], certainty(z))
    new["rest_certainty"] = recent.add(state["rest_certainty"], certainty(z - known * rest))
    low, high = DOUBT_RANGE
    certain = new["rest_certainty"] / op("Max", new["source_certainty"], _TINY)
    doubted = op("Clip", few - 1.0, 0.0, 1.0) * op("Clip", (high - certain) / (high - low), 0.0, 1.0)
    return fraction, rest * (1.0 - doubted * (1 - temperature.share_of(num_classes) ** 2))


def _log_temperature(
    op: Nodes,
    log: Value,
    share: float,
    raw: Value,
    models: tuple[Value, Value] | None,
    predicted: Value,
    counted: Value,
) -> Value:
    """Return the logarithm of the temperature sought (1,), as `remtta.pipeline.temperature`.

    Args:
        log: The one before.
        share: Of the number of classes.
        raw: Logits before centering, shape (B, C).
        models: Centered logits of both models of an ensemble, shape (B, C).
        predicted: Logits of the predictions, shape (B, C).
        counted: 1 for images that count, 0 for others, shape (B,).
    """
    total = op.sum(counted, 0, keepdims=True)

    def mean(values: Value) -> Value:
        return counted @ op("Cast", values, to=TensorProto.FLOAT) / op("Max", total, 1.0)

    def agreement(logits: Value, others: Value) -> Value:
        return mean(op("Equal", *(op("ArgMax", each, axis=1) for each in (logits, others))))

    def confidence(logits: Value) -> Value:
        return mean(op("GatherElements", op("Softmax", logits, axis=-1), op("ArgMax", logits, axis=1), axis=1))

    if models:
        agree, (by_source, by_adapted) = agreement(*models), (confidence(each) for each in models)
        gained = op("Max", by_adapted - op("Max", agree, by_source), 0.0)
        rate = agree + ((1.0 - agree) * temperature.CORRECTED + gained) * share
    else:
        unchanged = agreement(raw, predicted)
        rate = confidence(raw) * op("Pow", unchanged, 1 - share) + (1.0 - unchanged) * (share * temperature.CORRECTED)
    newest = 1.0 - op("Exp", total * (math.log(0.5) / temperature.HALF_LIFE))
    step = (confidence(predicted / op("Exp", log)) - rate) * newest * temperature.GAIN
    return op("Clip", log + step, -temperature.MAX_LOG, temperature.MAX_LOG)


def _mixture(op: Nodes, source: Value, adapted: Value) -> Value:
    """Return the logarithm of the mean probabilities (B, C) of both models, by their logits."""
    logs = [op("LogSoftmax", each, axis=-1) for each in (source, adapted)]
    most = op("Max", *logs)
    return most + op("Log", (op("Exp", logs[0] - most) + op("Exp", logs[1] - most)) * 0.5)


class _RunningMean:
    """An exponentially weighted running mean, as `remtta.pipeline.running_mean.RunningMean`.

    Args:
        weight: The sum of the weights so far, shape (1,).
        counted: 1 for images that count, 0 for others, shape (B,).
    """

    def __init__(self, op: Nodes, half_life: float, weight: Value, counted: Value) -> None:
        log_keep = math.log(0.5) / half_life
        later = op("CumSum", counted, np.int64(0), exclusive=1, reverse=1)
        self._op, self._weights = op, op("Exp", later * log_keep) * counted
        self._old = op("Exp", op.sum(counted, 0, keepdims=True) * log_keep) * weight
        self._new = op.sum(self._weights, 0, keepdims=True)
        self.weight = self._old + self._new
        self._divisor = op("Max", self.weight, _TINY)

    def add(self, mean: Value, values: Value) -> Value:
        """Return the mean (1,) or (C,) after images with values (B,) or (B, C)."""
        return mean + self._total(values - mean) / self._divisor  # exact, if values stay the same

    def add_covariance(self, covariance: Value, means: tuple[Value, Value], values: tuple[Value, Value]) -> Value:
        """Return the covariance (1,) after images of two quantities (B, C), summed over C, given both means before.

        It is that within the batch, and within the images before, and that of the means of both groups.
        """
        op = self._op
        a, b = (each - mean for each, mean in zip(values, means, strict=True))
        c, d = (self._total(each) / op("Max", self._new, _TINY) for each in (a, b))
        within = self._old * covariance + self._total(op.sum((a - c) * (b - d), 1))
        between = self._old * self._new / self._divisor * op.sum(c * d, 0, keepdims=True)
        return (within + between) / self._divisor

    def _total(self, values: Value) -> Value:
        """Return the weighted sum over the batch, at least one-dimensional."""
        return self._op("Reshape", self._weights @ values, (-1,))


def _see_views(op: Nodes, state: State, z: Value, finite: Value, indices: Value, views: Value) -> State:
    """Return what changes with views (K, C) of the images at indices (K,), by logits (B, C) of finite images (B,)."""
    padding = op(
        "Concat", op("ConstantOfShape", op("Shape", indices)), [1.0], axis=0
    )  # sums over no rows are undefined
    indices = op("Concat", indices, (0,), axis=0)
    views = op("Concat", views, op("Slice", z, (0,), (1,)), axis=0)
    exists = op("And", op("Less", padding, 0.5), op("Gather", finite, indices))
    exists = op("And", exists, are_finite(op, views, 1))
    plain, shuffled = (
        op("Where", op("Unsqueeze", exists, (1,)), each, 0.0) for each in (op("Gather", z, indices), views)
    )
    means = _RunningMean(op, HALF_LIFE / VIEW_EVERY, state["view_weight"], op("Cast", exists, to=TensorProto.FLOAT))
    v, w = state["plain"], state["shuffled"]
    return {
        "view_weight": means.weight,
        "plain": means.add(v, plain),
        "shuffled": means.add(w, shuffled),
        "variance": means.add_covariance(state["variance"], (v, v), (plain, plain)),
        "covariance": means.add_covariance(state["covariance"], (v, w), (plain, shuffled)),
    }


def _find_shift(op: Nodes, state: State, num_classes: int) -> Value:
    """Return the offset of the shift alone (C,), as `few_classes.find_shift`; 0 before the first view."""
    z = state["logits"]
    left = op("Clip", state["covariance"] / op("Max", state["variance"], _TINY), 0.0, MAX_LEFT)
    shift = _less_mean(op, state["plain"] - (state["plain"] - state["shuffled"]) / (1.0 - left), num_classes)
    explained = op.sum(shift * z, 0, keepdims=True) / op("Max", op.sum(shift * shift, 0, keepdims=True), _TINY)
    return shift * op("Clip", explained, 0.0, 1.0) * op("Clip", state["view_weight"], 0.0, 1.0)


def _find_unknown(op: Nodes, state: State, shift: Value, num_classes: int) -> Value:
    """Return the fraction of the mean that stays if there are few classes (1,), as `few_classes.fraction_unknown`."""
    common = _less_mean(op, state["logits"], num_classes) - shift
    common = op.sum(common * common, 0, keepdims=True)
    low, high = COMMON_RANGE
    fraction = common / op("Max", state["spread"] + common, _TINY)
    return op("Clip", (fraction - low) / (high - low), 0.0, 1.0) * op("Clip", state["view_weight"], 0.0, 1.0)


def _less_mean(op: Nodes, values: Value, num_classes: int) -> Value:
    """Return values (..., C) less their mean over classes."""
    return values - op.sum(values, -1, keepdims=True) / float(num_classes)
