"""Logit centering: subtract the offset that a distribution shift adds to the logits of all images.

The offset is the running mean of the logits, C numbers. If a stream shows few classes, the part of the mean that is due
to these stays in the logits (docs/guard.md, "Centered logits"; `few_classes.py` has the formulas).

Related: NEO (arXiv:2510.05635) centers the features of a whole domain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from remtta.models.weights import within
from remtta.pipeline import few_classes
from remtta.pipeline.running_mean import RunningMean

PredictShuffled = Callable[[Tensor], Tensor]
"""Returns the logits (K, C) of images at indices (K,) of a batch, with their patches shuffled."""


class LogitCentering:
    """The offsets of the source and the adapted model's logits, updated once per batch.

    Whether there are few classes is decided by the source model's predictions, if there are any: by the adapted
    model's, a class that wrongly dominates would look like one that the stream shows.

    Attributes:
        offsets: The values to subtract from the logits of "source" and "adapted": (C,), or 0 before the first batch.
        class_fraction_kept: The fraction of the shown classes' part that stays in the logits, a scalar, 0 to 1.
        uncentered: Whether most of the mean stays, since there are few classes and subtracting it is in doubt.
        times_uncentered: How often this began.

    Args:
        active: False to leave logits as they are.
    """

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        self.active, self._device = active, device
        self._double = torch.device("cpu") if device.type == "mps" else device  # MPS has no doubles
        self._events: list[dict[str, Any]] = []
        self.times_uncentered = 0
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self.offsets = dict.fromkeys(("source", "adapted"), torch.zeros((), device=self._device))
        self.class_fraction_kept = self._mean_without_classes = torch.zeros(
            (), device=self._double, dtype=torch.float64
        )
        self.uncentered = False
        self._by_source = False  # whether the source model's predictions decide
        self._num_since_view = 0  # images since the last one seen with shuffled patches, modulo VIEW_EVERY
        self._means = {name: RunningMean(few_classes.HALF_LIFE) for name in ("source", "adapted", "frames")}
        self._means["views"] = RunningMean(few_classes.HALF_LIFE / few_classes.VIEW_EVERY)
        self._means["recent_certainty"] = RunningMean(few_classes.HALF_LIFE)
        self._means["certainty"] = RunningMean(few_classes.EVIDENCE_HALF_LIFE)

    def reset_adapted(self) -> None:
        """Continue with the source model's means for the adapted model, whose weights are the source's again."""
        if not self._by_source:
            self.reset()
            return
        self.offsets["adapted"] = self.offsets["source"]
        self._means["adapted"].load_state_dict(self._means["source"].state_dict(), self._double)

    def source(self, logits: Tensor) -> Tensor:
        """Center logits (..., C) of the source model."""
        return logits.float() - self.offsets["source"]

    def adapted(self, logits: Tensor) -> Tensor:
        """Center logits (..., C) of the adapted model, also of masked views."""
        return logits.float() - self.offsets["adapted"]

    def update_source(self, logits: Tensor, counted: Tensor, shuffled: PredictShuffled) -> None:
        """Update the source model's offset by a batch; call it before `update_adapted`.

        Args:
            logits: Raw, shape (B, C).
            counted: Which images count, shape (B,), on the CPU; the others have no influence.
            shuffled: Predicts views with shuffled patches by the same model.
        """
        self._by_source = True
        self._update("source", logits, counted, shuffled)

    def update_adapted(self, logits: Tensor, counted: Tensor, shuffled: PredictShuffled | None = None) -> None:
        """Update the adapted model's offset likewise; `shuffled` is used if the source model never predicts."""
        self._update("adapted", logits, counted, shuffled)

    @torch.inference_mode(False)  # outside: it enables gradients
    @torch.no_grad()
    def _update(self, model: str, logits: Tensor, counted: Tensor, shuffled: PredictShuffled | None) -> None:
        if not self.active:
            return
        logits = logits.detach().float()
        indices = (counted & torch.isfinite(logits).all(1).cpu()).nonzero().flatten()
        if not len(indices):
            return
        z = logits.to(self._double).double()[indices.to(self._double)]
        (mean,) = self._means[model].add(z)
        known = 1 - self._means[model].inverse_ess  # few images show little
        if model == "source" or not self._by_source:
            self._update_class_part(z, mean, known, self._find_shift(z, mean, indices, shuffled))
        offset = known * torch.lerp(mean, self._mean_without_classes, self.class_fraction_kept)
        self.offsets[model] = offset.to(self._device, torch.float32)

    def _update_class_part(self, z: Tensor, mean: Tensor, known: float, shift: Tensor) -> None:
        """Find the mean logits (C,) without the part of the shown classes, and whether these are few."""
        p, centered = (z - shift).softmax(-1), (z - known * mean).softmax(-1)
        mean_p, zz = self._means["frames"].add(p, (z - z.mean(-1, keepdim=True)).square().sum(-1))
        pp, cc = self._means["certainty"].add(p.square().sum(-1), centered.square().sum(-1))
        unknown = few_classes.fraction_unknown(mean, zz, shift) if self._means["views"].values else 0
        rest = (1 - unknown) * mean - few_classes.class_part(mean_p)
        predictions = (z.softmax(-1), (z - known * rest).softmax(-1))
        rr, qq = self._means["recent_certainty"].add(*(each.square().sum(-1) for each in predictions))
        evidence = few_classes.evidence_of_few(pp, cc, len(mean))
        trusted = 1 - few_classes.fraction_doubted(evidence, rr, qq, len(mean))
        self._mean_without_classes = trusted * rest
        self.class_fraction_kept = evidence.clamp(0, 1)
        self._note(float(1 - self.class_fraction_kept * (1 - trusted * (1 - unknown))))

    def _note(self, subtracted: float) -> None:
        """Note an event if the fraction of the mean that is subtracted passes a half."""
        if self.uncentered == (subtracted < 1 / 2):
            return
        self.uncentered = not self.uncentered
        self.times_uncentered += self.uncentered
        few = round(float(self.class_fraction_kept), 4)
        event = "uncentered" if self.uncentered else "centered"
        self._events.append({"event": event, "few_classes": few, "subtracted": round(subtracted, 4)})

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _find_shift(self, z: Tensor, mean: Tensor, indices: Tensor, shuffled: PredictShuffled | None) -> Tensor:
        """Return the offset of the shift alone (C,), by views with shuffled patches; 0 without any."""
        views = self._means["views"]
        if shuffled is not None:
            chosen = torch.arange(len(z))[-self._num_since_view % few_classes.VIEW_EVERY :: few_classes.VIEW_EVERY]
            self._num_since_view = (self._num_since_view + len(z)) % few_classes.VIEW_EVERY
            w = shuffled(indices[chosen]).to(z) if len(chosen) else z[:0]
            if (finite := torch.isfinite(w).all(1)).any():
                v, w = z[chosen.to(z.device)][finite], w[finite]
                views.add(v, w, v.square().sum(-1), (v * w).sum(-1))
        return few_classes.find_shift(mean, *views.values) if views.values else torch.zeros_like(mean)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next offsets depend on, on the CPU."""
        if not self.active:
            return {}
        state = {f"offset.{name}": offset for name, offset in self.offsets.items()}
        state |= {
            "few": self.class_fraction_kept,
            "mean_without_classes": self._mean_without_classes,
            "by_source": torch.tensor(self._by_source),
        }
        state["uncentered"], state["times_uncentered"] = map(torch.tensor, (self.uncentered, self.times_uncentered))
        state["num_since_view"] = torch.tensor(self._num_since_view)
        for name, mean in self._means.items():
            state |= {f"{name}.{key}": value for key, value in mean.state_dict().items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        if not self.active:
            return
        self.offsets = {name: state[f"offset.{name}"].to(self._device) for name in self.offsets}
        self.class_fraction_kept = state["few"].to(self._double)
        self._mean_without_classes = state["mean_without_classes"].to(self._double)
        self._by_source, self._num_since_view = bool(state["by_source"]), int(state["num_since_view"])
        self.uncentered, self.times_uncentered = bool(state["uncentered"]), int(state["times_uncentered"])
        for name, mean in self._means.items():
            mean.load_state_dict(within(f"{name}.", state), self._double)
