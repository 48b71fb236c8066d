"""`remtta tune`: which settings suit a stream, tried on a stretch of it without labels, or with a few."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.groups import Only
from remtta.cli.loading import load_classifier, model_arguments
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import PrintOptions, RunningOptions
from remtta.cli.options.stream import Source, StreamOptions
from remtta.cli.parsing import parse_pairs
from remtta.cli.progress import tune_progress
from remtta.cli.reporting import refused_values
from remtta.errors import UsageError
from remtta.options import DEFAULT_BATCH_SIZE
from remtta.runs.reading import printable

if TYPE_CHECKING:
    from remtta.runs.tuning import Choice, Lead, Trial

_log = logging.getLogger("remtta")

_LIMIT = 500
_OPTIONS = ("method", "batch_size", "lr", "anchor", "optimizer", "momentum", "steps", "margin", "adapt_layers")
"""Settings that are options of `remtta adapt` by their own names; the others go by --set."""


@dataclass(frozen=True)
class GridOptions:
    """What is tried, and what is known."""

    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,...",
            help="Values of a setting, or of method or batch_size; several make all combinations. Default: the paper's "
            "settings, and rates from 0.003 to 0.1.",
        ),
    ] = None
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Frames per update, of all that is tried.")
    ] = DEFAULT_BATCH_SIZE
    true_labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of source and label_true, of some frames."),
    ] = None

    @refused_values()
    def settings(self) -> Sequence[Mapping[str, Any]]:
        """The settings to try, the default first.

        Raises:
            UsageError: If one is none.
        """
        from remtta.runs.tuning import RATES, grid_of

        own = {} if self.batch_size == DEFAULT_BATCH_SIZE else {"batch_size": self.batch_size}
        if not self.grid:
            return [own | dict(values) for values in RATES]
        values: dict[str, list[Any]] = {}
        for text in self.grid:
            name, equals, told = text.partition("=")
            if not equals or not told:
                raise UsageError(f"--grid takes KEY=A,B,..., got {text!r}")
            values[name] = [parse_pairs([f"{name}={each}"], "--grid")[name] for each in told.split(",")]
        return [own | dict(each) for each in grid_of(values)]


def tune(
    source: Source,
    grid: GridOptions,
    model: Annotated[
        ModelOptions,
        Only(
            *("model", "checkpoint", "use_ema", "num_classes", "model_kwargs", "labels"),
            *("mean", "std", "input_size", "interpolation", "crop_pct"),
        ),
    ],
    stream: Annotated[StreamOptions, Only("sort", "frame_stride", limit=_LIMIT)],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Only("device", "threads", "seed", "verbose", "quiet", "debug")],
) -> None:
    """Try settings on the first frames of SOURCE, and print the command with those that suit it.

    Goes by how much the adapted predictions tell apart, and by labels where there are some. It is the default unless
    something else is better by more than chance.

    Examples:

      remtta tune ./frames --checkpoint vit.safetensors

      remtta tune clip.mp4 --grid lr=0.003,0.01,0.03 --grid batch_size=10,50 --true-labels picked.csv
    """
    with running.command() as interrupts:
        given, names = model.given(), model.class_names()
        settings = grid.settings()

        from remtta.models.labels import labels_of
        from remtta.runs.tuning import choose, read_true_labels, try_all

        again = replace(stream, limit=stream.limit or _LIMIT)
        _check(again, source, labelled=grid.true_labels is not None)
        running.set_threads()
        classifier = load_classifier(model_arguments(given), names, running.device, adapts=True)
        labels = read_true_labels(grid.true_labels, labels_of(classifier)) if grid.true_labels else {}
        with tune_progress(len(settings) + 1, hidden=running.quiet) as advance:
            trials = try_all(
                classifier,
                lambda: again.open(source, resume=False),
                settings,
                labels,
                seed=running.seed,
                interrupts=interrupts,
                on_trial=advance,
            )
        choice = choose(trials)
        command = _command(source, given, model.labels, choice)
        if printed.as_json:
            typer.echo(json.dumps(_content(trials, choice, command), indent=2))
        else:
            typer.echo("\n".join(map(printable, [*_table(trials), "", _verdict(trials, choice), command])))


def _check(stream: StreamOptions, source: str, *, labelled: bool) -> None:
    """Refuse a source that cannot be read several times, and tell at once if it is too short."""
    from remtta.runs.tuning import LEAST_WINDOWS, WINDOW

    opened = None if source == "-" else stream.open(source, resume=False)
    if opened is None or opened.live:
        told = opened.name if opened else "standard input"
        raise UsageError(f"{told} cannot be read several times; record a stretch of it to files first")
    least, frames = LEAST_WINDOWS * WINDOW, opened.num_frames
    if frames is not None and frames < least and not labelled:
        _log.warning("to choose without labels takes %d frames, and there are %d: the default will stay", least, frames)


def _table(trials: Sequence[Trial]) -> list[str]:
    from remtta.runs.tuning import label_lead, lead

    default = trials[1]
    labelled = len(default.right) > 0
    titles = [_title(trial.values) for trial in trials]
    width = max(map(len, titles))
    lines = [
        f"{'':<{width}}  told apart  against the default  entropy  classes{'  labelled right' if labelled else ''}"
    ]
    for title, trial in zip(titles, trials, strict=True):
        against = "" if trial is default else _spread(lead(trial, default), 3)
        right = f"  {int(trial.right.sum())}/{len(trial.right)}" if labelled else ""
        right += f" ({_spread(label_lead(trial, default), 1, 100)} points)" if labelled and trial is not default else ""
        apart = float(trial.information.mean())
        lines.append(f"{title:<{width}}  {apart:10.3f}  {against:>19}  {trial.entropy:7.3f}  {trial.classes:7d}{right}")
    return lines


def _title(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "default"


def _spread(lead: Lead, digits: int, unit: float = 1.0) -> str:
    known = lead.standard_error < float("inf")
    return f"{unit * lead.mean:+.{digits}f}" + (f" ± {unit * lead.standard_error:.{digits}f}" if known else "")


def _verdict(trials: Sequence[Trial], choice: Choice) -> str:
    from remtta.runs.tuning import label_lead, lead

    default = trials[1]
    if choice.by == "default" and all(lead(trial, default).standard_error == float("inf") for trial in trials):
        return "Too few frames to choose by without labels, as that takes 300; so the default:"
    if choice.by == "default":
        return "Nothing tried is better than the default by more than chance (two standard errors):"
    if choice.by == "labels":
        told = f"{_spread(label_lead(choice.trial, default), 1, 100)} points of {len(default.right)} labelled frames"
    else:
        told = f"{_spread(lead(choice.trial, default), 3)} nats told apart; it may be wrong, as labels were not asked"
    return f"Better than the default, by {told}:"


def _command(source: str, given: Mapping[str, Any], labels: Path | None, choice: Choice) -> str:
    """The command that runs all of the stream so."""
    words = ["remtta", "adapt", source]
    for name, value in given.items():
        option = f"--{'model' if name == 'name' else name.replace('_', '-')}"
        if name == "model_kwargs":
            words += [word for key, each in value.items() for word in (option, f"{key}={each}")]
        elif value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    words += [] if labels is None else ["--labels", str(labels)]
    for name, value in choice.trial.values.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if name in _OPTIONS else ["--set", f"{name}={value}"]
    return shlex.join(words)


def _content(trials: Sequence[Trial], choice: Choice, command: str) -> dict[str, Any]:
    from remtta.runs.tuning import label_lead, lead

    default = trials[1]
    told = [
        {
            "settings": dict(trial.values),
            "information": float(trial.information.mean()),
            "lead": _told(lead(trial, default)),
            "entropy": trial.entropy,
            "classes": trial.classes,
            "labelled": len(trial.right),
            "right": int(trial.right.sum()),
            "right_lead": _told(label_lead(trial, default)),
            "images_per_s": trial.images_per_s,
        }
        for trial in trials
    ]
    return {"trials": told, "picked": dict(choice.trial.values), "by": choice.by, "command": command}


def _told(lead: Lead) -> dict[str, float | None]:
    """A lead, ready for JSON; no standard error where there are too few to have one."""
    known = lead.standard_error < float("inf")
    return {"mean": lead.mean, "standard_error": lead.standard_error if known else None}
