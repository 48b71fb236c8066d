"""The time that an evaluation still takes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remtta.lab.evaluation.context import EvaluationContext
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.time_left import TimeLeft
from remtta.lab.evaluation.trial_writer import EvaluationProgress, TrialProgress
from remtta.lab.evaluation.variants import parse_variants
from tests.lab.evaluation.test_tables import RECORD
from tests.lab.evaluation.trees import evaluate_tiny

NONE: Any = None


def context_of(dataset: Dataset, passes: dict[str, float], **options: Any) -> EvaluationContext:
    given = EvalOptions(seeds=(0, 1), **options)
    return EvaluationContext(NONE, NONE, dataset, parse_variants(passes), {}, given, (), 7, None, passes=passes)


def test_methods_take_as_long_as_their_passes_suggest_until_one_of_their_runs_is_done(tree: Dataset) -> None:
    """Of 84 images, half are only predicted again (--revisit); `rem` makes 6 passes for the others, 3.5 on average."""
    left = TimeLeft(context_of(tree, {"source": 1, "rem": 6}, revisit=True))
    begun = EvaluationProgress([], ("source", 0), TrialProgress(frames=10))
    # source, once: 74 images of 3 s; rem, twice: 84 images of 2 s + 3.5 passes of 1 s.
    assert (
        left.after_batches(begun, 3, 1) == "about 0:19:06 left for all runs (h:mm:ss)"
    )  # 74 * 3 + 2 * 84 * 5.5 = 1146 s
    source, rem = (replace(RECORD, method=name, images=84, timing={"seconds": 84.0}) for name in ("source", "rem"))
    twice = EvaluationProgress([source, rem], ("low=rem", 0), TrialProgress(frames=80))
    # 4 images of 3 s; then its second run, and the second of `rem`, whose first one took 1 s for an image.
    left = TimeLeft(context_of(tree, {"source": 1, "rem": 6, "low=rem": 1}, revisit=True))
    assert (
        left.after_batches(twice, 3, 1) == "about 0:08:36 left for all runs (h:mm:ss)"
    )  # 4 * 3 + 84 * 3 + 84 * 3 = 516 s


def test_trials_in_workers_share_the_time(tree: Dataset) -> None:
    left = TimeLeft(context_of(tree, {"source": 1, "rem": 6}))
    source = replace(RECORD, method="source", images=42, timing={"seconds": 42.0})
    for methods, jobs, shown in ((["rem", "rem", "source"], 2, "0:04:33"), (["rem"], 8, "0:04:12")):
        assert (
            left.after_trials([source], methods, jobs) == f"about {shown} left for all runs (h:mm:ss)"
        )  # 42 * 13 / 2, 42 * 6 s


@pytest.mark.parametrize("options", [{}, {"engine": "processes", "jobs": 1}])
def test_an_evaluation_tells_how_long_it_takes(
    options: dict[str, Any], tree: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    evaluate_tiny(tree, tmp_path / "run", ["source", "rem"], batch_size=4, **options)
    left = [line for line in caplog.messages if line.endswith(" left for all runs (h:mm:ss)")]
    runs = (
        ["source, seed 0: done, 1 of 2 runs; about "]
        if options
        else [f"{name}, seed 0: " for name in ("source", "rem")]
    )
    assert len(left) == len(runs) and all(line.startswith(run) for line, run in zip(left, runs, strict=True))
    assert options or all(re.search(r": \d+\.\d images/s; about 0:00:\d\d left", line) for line in left)
