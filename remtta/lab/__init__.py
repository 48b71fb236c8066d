"""Evaluation, corrupted images, benchmark, doctor, report and demo. Imports no torch."""

from __future__ import annotations

from remtta.methods.settings.core import MethodSpec

METHODS: dict[str, MethodSpec] = {
    "supervised": MethodSpec(
        "remtta.lab.supervised:Supervised",
        "train on the true labels: an upper bound, in remtta eval only",
        needs_labels=True,
    ),
}
"""Methods by name."""
