"""Evaluate methods on labelled domains: datasets, scenarios, metrics, tables and plots."""

from __future__ import annotations

from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.preprocessing import choose_preprocessing

__all__ = ["choose_preprocessing", "evaluate", "open_dataset"]
