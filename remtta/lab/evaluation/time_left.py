"""Estimate how long an evaluation still takes: all methods, seeds and domains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from remtta.lab.evaluation.context import EvaluationContext
from remtta.lab.evaluation.scenarios import plan_visits
from remtta.lab.evaluation.trial_writer import EvaluationProgress, TrialRecord


class TimeLeft:
    """Estimates by the images of a trial, and by the passes that its method makes per image."""

    def __init__(self, context: EvaluationContext) -> None:
        visits = plan_visits(context.dataset, context.options, context.options.seeds[0])
        self._context, self._images = context, sum(len(visit.items) for visit in visits)
        learned = sum(len(visit.items) for visit in visits if visit.phase == "adapt") / max(1, self._images)
        self._passes = {name: 1 + learned * (passes - 1) for name, passes in context.passes.items()}

    def after_batches(self, progress: EvaluationProgress, seconds: float, in_method: float) -> str:
        """Return the time left after the first batches of the current trial.

        Args:
            seconds: Duration per image.
            in_method: The part of it that the method took; the rest, such as decoding, is the same for all methods.
        """
        assert progress.current is not None
        name, context, other = progress.current[0], self._context, seconds - in_method
        per_pass = in_method / context.passes[name]
        here = (self._images - progress.position.frames) * (other + per_pass * self._passes[name])
        trials = progress.remaining(context.variants.values(), context.options)
        later = [name for name, seed in trials if (name, seed) != progress.current]
        return _shown(here + self._of_trials(later, progress.finished, per_pass, other))

    def after_trials(self, finished: Sequence[TrialRecord], methods: Sequence[str], jobs: int) -> str:
        """Return the time left for trials of methods of which so many run at the same time, after others finished."""
        seconds = sum(trial.timing["seconds"] for trial in finished)
        per_pass = seconds / sum(trial.images * self._passes[trial.method] for trial in finished)
        return _shown(self._of_trials(methods, finished, per_pass) / min(jobs, max(1, len(methods))))

    def _of_trials(
        self, methods: Iterable[str], finished: Iterable[TrialRecord], per_pass: float, other: float = 0.0
    ) -> float:
        """Return the seconds of trials, which depend on their passes unless one of the same method is finished."""
        known = {trial.method: trial.timing["seconds"] / trial.images for trial in finished}
        return sum(self._images * (other + known.get(name, per_pass * self._passes[name])) for name in methods)


def _shown(seconds: float) -> str:
    return f"about {timedelta(seconds=max(0, round(seconds)))} left for all runs (h:mm:ss)"
