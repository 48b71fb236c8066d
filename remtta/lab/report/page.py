"""One HTML page on runs and evaluations; content of files is escaped, and no script can run."""

from __future__ import annotations

import base64
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from PIL import Image

from remtta._version import __version__
from remtta.errors import FrameError, UsageError, counted
from remtta.files import write_atomically
from remtta.lab.report import charts
from remtta.lab.report.charts import Series, class_name, read_series
from remtta.lab.report.evaluations import describe_evaluation, evaluation_facts
from remtta.lab.scores import class_table, remarks, score_run, time_table, verdict
from remtta.lab.tables import notes, outcome, table_rows
from remtta.runs.folder import RECORD, RESULTS, STREAM_GROUP
from remtta.runs.inspection import Content, Facts, describe_run, kind_of, read_content, run_facts, state_of
from remtta.runs.reading import Row, printable, read_object, reading
from remtta.streams.images import load_image

_MAX_BYTES = 5_000_000
_PLOT, _PLOT_TEXT = "running_error.png", "Error of each method over the images, with the start of each domain"
_THUMBNAIL_SIZE, _PLOT_SIZE = (160, 160), (1200, 4800)  # at most so many pixels wide and high

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Run:
    name: str
    content: Content
    series: Series
    facts: Facts
    score: Content | UsageError | None  # on labelled frames, or why there is none


def write_report(folders: Sequence[Path], output: Path, labels: Path | None = None) -> None:
    """Write one page on runs and evaluations, which needs neither network nor other files. Raise UsageError if a folder
    holds neither, the labels are of no run's frames, or the page would be too large; RemttaError if a file is
    damaged; OutputError if the page cannot be written; an existing page is left unchanged.

    Args:
        labels: The classes of some frames of each run; see `score_run`.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs, evaluations = list[_Run](), list[str]()
    verdicts: dict[str, list[str]] = {RECORD: [], RESULTS: []}
    for name, folder in zip(names, folders, strict=True):
        with reading(folder):
            kind = kind_of(folder)
            if kind == STREAM_GROUP:
                streams = " ".join(str(folder / stream) for stream in read_content(folder / STREAM_GROUP)["streams"])
                raise UsageError(f"{folder} holds the runs of many streams; name them: remtta report {streams}")
            if kind == RECORD:
                content = describe_run(folder)
                series = read_series(folder, (content.get("predictions") or {}).get("predicted", 0))
                score = None if labels is None else _score_or_error(folder, labels)
                runs.append(_Run(name, content, series, _facts(content, series), score))
                known = verdict(score) if isinstance(score, dict) and "gain" in score else None
                verdicts[kind].append(f"{name}: {_verdict(content, series, known)}")
            else:
                content = describe_evaluation(folder)
                results = read_object(folder / RESULTS) if content["evaluation"]["methods"] else None
                verdicts[kind].append(
                    f"{name}: {(results and outcome(results)) or 'No comparison with the source model.'}"
                )
                evaluations += _evaluation(name, folder, content, results)
    refused = {run.name: run.score for run in runs if isinstance(run.score, UsageError)}
    if refused and len(refused) == len(runs):
        raise next(iter(refused.values()))
    for name, error in refused.items():
        _log.warning("%s has no score: %s", name, error)
    with reading(folders[0] if len(folders) == 1 else f"one of {', '.join(map(str, folders))}"):
        lines = (f'<p class="verdict">{_text(line)}</p>' for each in verdicts.values() for line in each)
        body = [*lines, *_run_sections(runs), *evaluations]
    body.append(f"<p>Made by remtta {__version__} from the files in {_text(', '.join(map(str, folders)))}.</p>")
    page = _page(f"remtta: {', '.join(names)}", body).encode()
    if len(page) > _MAX_BYTES:
        raise UsageError(f"the page would take {len(page) / 1e6:.1f} MB, and the limit is 5; give fewer runs")
    write_atomically(output, lambda temporary: temporary.write_bytes(page))


def _score_or_error(folder: Path, labels: Path) -> Content | UsageError:
    """Return the score of a run, or why the labels do not fit it, as they may fit other runs."""
    try:
        return score_run(folder, labels, option="--labels-file")
    except UsageError as error:
        return error


# --- Sections --------------------------------------------------------------------------------------------------------


def _verdict(content: Content, series: Series, score: str | None) -> str:
    """Return in one line whether a run's updates did harm, by its score if known, else as far as the guard saw."""
    run = content["run"]
    updates, guard = run["counts"]["updates"], run.get("guard")
    if guard is not None and guard.get("retired"):
        return score or "Adaptation did harm and has ended: the source model predicts."
    doubt = "" if guard is None else _doubt(content, series)
    if score is not None:
        return f"{score} {doubt[:1].upper()}{doubt[1:]}".strip()
    if not updates:
        return "The weights did not change."
    if guard is None:
        return f"{counted(updates, 'update')}; without a guard, whether they help is unknown."
    if ((run.get("options") or {}).get("guard") or {}).get("action") == "off":
        return f"{counted(updates, 'update')}; the guard was off{_lead(guard)}, so whether they help is unknown."
    counts = Counter(event["event"] for event in series.events)
    alarms = max(guard.get("alarms", 0), counts["rollback"] + counts["warning"])  # the record may be older
    past = {"alarm": alarms, "restart": counts["restart"], "doubt": counts["doubt"] - bool(doubt)}
    harm = " and ".join(counted(number, name) for name, number in past.items() if number > 0)
    if not harm and not doubt:
        return f"{counted(updates, 'update')}, no sign of harm."
    seen = f", {harm} of the guard" if harm else ""
    return f"{counted(updates, 'update')}{seen}; {doubt or 'not in doubt at the end.'}"


def _doubt(content: Content, series: Series) -> str:
    """Return a sentence if the guard was in doubt at the end of a run, or "".

    A verdict holds until the next, or until the source weights were restored.
    """
    names = ("doubt", "warning", "trust", "restart", "rollback", "retired")
    judged = [each for each in series.events if each["event"] in names and each["frame"] >= series.last_reset]
    if not judged or judged[-1]["event"] not in names[:2]:
        return ""
    run, last = content["run"], judged[-1]
    is_running = state_of(run["exit_reason"], content["alive"]) == "running"
    lead = "" if run["exit_reason"] == "running" else _lead(run["guard"])  # a record saved before the end may be older
    reason = f" ({last['reason']})" if "reason" in last else ""
    return f"the run {'is' if is_running else 'ended'} in doubt{reason}{lead or _lead(last)}."


def _lead(judgment: Content) -> str:
    return f", lead {100 * judgment['lead']:+z.0f} %" if judgment.get("lead") else ""


def _facts(content: Content, series: Series) -> Facts:
    facts, latency = run_facts(content), content["run"]["timing"].get("latency_ms")
    if isinstance(latency, dict):
        percentiles = (f"{name} {value:,.1f}" for name, value in latency.items() if isinstance(value, (int, float)))
        facts["latency of a batch in ms"] = ", ".join(percentiles)
    if series.both_predicted:
        facts["models disagree"] = f"on {counted(series.num_differing, 'frame')}"
    if series.changes:
        facts["stream changed"] = f"at about frame {', '.join(str(before + 1) for before, _ in series.changes)}"
    return facts


def _run_sections(runs: Sequence[_Run]) -> Iterator[str]:
    if runs:
        table = _facts_table([run.name for run in runs], [run.facts for run in runs])
        yield f"<section><h2>Runs</h2>{table}</section>"
    yield _section("Labelled frames", (_score(run.name, run.score) for run in runs if run.score))
    sections = "".join(_chart_sections(runs))
    yield f'<div class="columns">{sections}</div>' if len(runs) == 1 else sections
    changes = [_thumbnails(run.name, run.series.at_changes, _beside, len(run.series.index)) for run in runs]
    yield _section("Frames before and after the stream changed", changes)
    differing = [_thumbnails(run.name, run.series.differing, _both, run.series.num_differing) for run in runs]
    yield _section("Frames on which the adapted and the source model disagree", differing)
    unsure = [_thumbnails(run.name, run.series.unsure, _prediction, len(run.series.index)) for run in runs]
    yield _section("Frames of lowest confidence", unsure)


def _chart_sections(runs: Sequence[_Run]) -> Iterator[str]:
    with_frames = [run for run in runs if run.series.index]
    names = [run.name for run in with_frames]
    for title, chart in (
        ("Over time", charts.over_time),
        ("Estimated accuracy", charts.accuracy),
        ("Predicted classes", charts.classes),
    ):
        images = charts.draw(names, [chart(run.series) for run in with_frames])
        yield _section(title, (_figure("", image) for image in images if image))
    yield _section("Changed layers", _layers([run for run in runs if "delta" in run.content]))


def _score(name: str, score: Content | UsageError) -> str:
    """Return a run's errors on labelled frames, also in tables, or why there are none."""
    if isinstance(score, UsageError):
        return f"<div><h3>{_text(name)}</h3><p>{_text(str(score))}</p></div>"
    tables = "".join(_table(*table, css_class="numbers") for table in (time_table(score), class_table(score)))
    notes = "".join(f"<p>{_text(line)}.</p>" for line in remarks(score))
    return f"<div><h3>{_text(name)}</h3><p>{_text(verdict(score))} In %:</p>{tables}{notes}</div>"


def _layers(runs: Sequence[_Run]) -> Iterator[str]:
    """Yield the charts of the deltas' layers; heads, whose bias moves on another scale, are in captions."""
    heads, others = [], []
    for delta in (run.content["delta"] for run in runs):
        heads.append([layer for layer in delta["layers"] if layer["layer"] in delta["head"]])
        others.append([layer for layer in delta["layers"] if layer["layer"] not in delta["head"]])
    images = charts.draw([run.name for run in runs], [charts.layers(layers) for layers in others])
    for run, image, head in zip(runs, images, heads, strict=True):
        caption = "; ".join(f"{layer['layer']}, by centering: {layer['rms']:.2e}" for layer in head)
        if image or caption:
            yield _figure(caption if image else f"{run.name}: {caption}", image)


def _both(row: Row) -> str:
    return "; ".join(f"{model}: {_prediction(row['each'][model])}" for model in ("adapted", "source"))


def _beside(row: Row) -> str:
    return f"{row['side']}: {_prediction(row)}"


def _prediction(row: Row) -> str:
    return f"{class_name(row)}, {row['prob']:.2f}"


def _thumbnails(name: str, rows: Sequence[Row], caption_of: Callable[[Row], str], num_frames: int) -> str:
    """Return a run's rows with thumbnails of their image files, as far as they can still be read."""
    figures = []
    for row in rows:
        path = Path(row["source"])
        short = Path(*path.parts[-2:])  # files of several folders often share their names
        caption = f"{row['index']}, {short}. {caption_of(row)}"
        url = _data_url(path, _THUMBNAIL_SIZE)
        image = f'<img src="{url}" alt="{_text(caption)}">' if url else '<p class="gone">no longer readable</p>'
        figures.append(_figure(caption, image))
    note = f"<h3>{_text(name)}</h3><p>{len(rows)} of {num_frames}</p>"
    return f'<div>{note}<div class="frames">{"".join(figures)}</div></div>' if figures else ""


def _evaluation(name: str, folder: Path, content: Content, results: Content | None) -> Iterator[str]:
    facts = _facts_table([name], [evaluation_facts(content)])
    yield f"<section><h2>Evaluation: {_text(name)}</h2>{facts}</section>"
    if results:
        table, legend = _table(*table_rows(results), css_class="numbers"), "; ".join(notes(results))
        yield f"<section><h2>Methods: {_text(name)}</h2>{table}<p>{_text(legend)}.</p></section>"
    plot = folder / "plots" / _PLOT
    if plot.is_file() and (url := _data_url(plot, _PLOT_SIZE)):
        image = f'<img class="wide" src="{url}" alt="{_PLOT_TEXT}">'
        yield f"<section><h2>Error over time: {_text(name)}</h2>{image}</section>"


def _data_url(path: Path, size: tuple[int, int]) -> str | None:
    """Return an image, downscaled to at most this size, as a data URL; None if it cannot be read."""
    try:
        image = load_image(path)
    except FrameError:
        return None
    image.thumbnail(size, Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


# --- HTML ------------------------------------------------------------------------------------------------------------


def _text(content: object) -> str:
    """Escape content for the page."""
    return escape(printable(str(content)))


def _section(title: str, parts: Iterable[str]) -> str:
    """Return a heading with parts side by side below it, or nothing if all parts are empty."""
    body = "".join(parts)
    return f'<section><h2>{_text(title)}</h2><div class="runs">{body}</div></section>' if body else ""


def _figure(caption: str, picture: str) -> str:
    text = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return f"<figure>{picture}{text}</figure>"


def _facts_table(names: Sequence[str], columns: Sequence[Facts]) -> str:
    """Return a table of facts, with a column per run."""
    headings = dict.fromkeys(heading for facts in columns for heading in facts)
    return _table(["", *names], ([heading, *(facts.get(heading, "") for facts in columns)] for heading in headings))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], css_class: str = "text") -> str:
    """Return a table; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{_text(heading)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>'
        for heading, *cells in rows
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{css_class}">{table}</table></div>'


def _page(title: str, body: Iterable[str]) -> str:
    style = resources.files("remtta.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head><body><main><h1>{_text(title)}</h1>"
        f"{''.join(body)}</main></body></html>\n"
    )
