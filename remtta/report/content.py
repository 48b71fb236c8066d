"""The content of a page on runs and evaluations, side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from remtta._version import __version__
from remtta.errors import FrameError, UsageError, counted
from remtta.files import write_atomically
from remtta.report import charts, page
from remtta.report.facts import evaluation_facts, run_facts
from remtta.report.inspection import describe_folder
from remtta.report.series import Series, name_of, read_series
from remtta.runs.folder import RESULTS
from remtta.runs.reading import Row, read_object, reading
from remtta.runs.tables import notes, outcome, table_rows
from remtta.streams.images import load_image

_ERRORS, _ERRORS_ALT = "running_error.png", "Error of each method over the images, with the start of each domain"
_THUMB, _PLOT = (160, 160), (1200, 4800)  # at most so many pixels wide and high


@dataclass(frozen=True)
class _Run:
    name: str
    content: Mapping[str, Any]
    series: Series
    facts: Mapping[str, str]


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write one page on runs and evaluations, which needs neither network nor other files. Raise UsageError if a folder
    holds neither, or the page would be too large; RemttaError if a file is damaged; OutputError if the page cannot be
    written; an existing page is left unchanged.
    """
    names = _names(folders)
    runs, evaluations = [], list[str]()
    for name, folder in zip(names, folders, strict=True):
        with reading(folder):
            content = describe_folder(folder)
            if "site" in content:
                streams = " ".join(str(folder / each) for each in content["site"]["streams"])
                raise UsageError(f"{folder} holds the runs of many streams; name them: remtta report {streams}")
            if "run" in content:
                series = read_series(folder, (content.get("predictions") or {}).get("predicted", 0))
                runs.append(_Run(name, content, series, _facts(content, series)))
            if "evaluation" in content:
                evaluations += _evaluation(name, folder, content)
    with reading(folders[0] if len(folders) == 1 else f"one of {', '.join(map(str, folders))}"):
        body = [_summary(runs), *_over_time(runs), *_frames(runs), *evaluations]
    body.append(f"<p>Made by remtta {__version__} from the files in {page.text(', '.join(map(str, folders)))}.</p>")
    whole = page.whole(f"remtta: {', '.join(names)}", body).encode()
    if len(whole) > page.MAX_BYTES:
        raise UsageError(f"the page would take {len(whole) / 1e6:.1f} MB, and the limit is 5; give fewer runs")
    write_atomically(output, lambda temporary: temporary.write_bytes(whole))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return short names of folders, or full paths if those are not unique."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _summary(runs: Sequence[_Run]) -> str:
    if not runs:
        return ""
    return f"<section><h2>Runs</h2>{page.facts([run.name for run in runs], [run.facts for run in runs])}</section>"


def _facts(content: Mapping[str, Any], series: Series) -> dict[str, str]:
    facts, latency = run_facts(content), content["run"]["timing"].get("latency_ms")
    if isinstance(latency, dict):
        percentiles = (f"{name} {value:,.1f}" for name, value in latency.items() if isinstance(value, (int, float)))
        facts["latency of a batch in ms"] = ", ".join(percentiles)
    if series.by_both:
        facts["models disagree"] = f"on {counted(series.num_differing, 'frame')}"
    return facts


def _over_time(runs: Sequence[_Run]) -> Iterator[str]:
    seen = [run for run in runs if len(run.series.index)]
    yield page.section("Over time", [page.figure(run.name, charts.over_time(run.series)) for run in seen])
    estimated = [run for run in seen if run.series.estimates]
    yield page.section("Estimated accuracy", [page.figure(run.name, charts.accuracy(run.series)) for run in estimated])
    yield page.section("Predicted classes", [page.figure(run.name, charts.classes(run.series)) for run in seen])
    moved = [(run.name, run.content["delta"]["layers"]) for run in runs if run.content.get("delta")]
    yield page.section("Changed layers", [page.figure(name, charts.layers(layers)) for name, layers in moved if layers])


def _frames(runs: Sequence[_Run]) -> Iterator[str]:
    found = [(run.name, run.series) for run in runs]
    differing = [_thumbnails(name, each.differing, _by_each, each.num_differing) for name, each in found]
    yield page.section("Frames on which the adapted and the source model disagree", differing)
    unsure = [_thumbnails(name, each.unsure, _prediction, len(each.index)) for name, each in found]
    yield page.section("Frames of lowest confidence", unsure)


def _by_each(row: Row) -> str:
    return "; ".join(f"{who}: {_prediction(row['each'][who])}" for who in ("adapted", "source"))


def _prediction(row: Row) -> str:
    return f"{name_of(row)}, {row['prob']:.2f}"


def _thumbnails(name: str, rows: Sequence[Row], caption: Callable[[Row], str], count: int) -> str:
    """Return a run's rows with thumbnails of their image files, as far as they can still be read."""
    shown = []
    for row in rows:
        source = Path(row["source"])
        place = Path(*source.parts[-2:])  # files of several folders often share their names
        shown.append((_address_of(source, _THUMB), f"{row['index']}, {place}. {caption(row)}"))
    return page.frames(name, shown, f"{len(rows)} of {count}") if shown else ""


def _evaluation(name: str, folder: Path, content: Mapping[str, Any]) -> list[str]:
    facts = page.facts([name], [evaluation_facts(content)])
    parts = [f"<section><h2>Evaluation: {page.text(name)}</h2>{facts}</section>"]
    if content["evaluation"]["methods"]:
        results = read_object(folder / RESULTS)
        told = page.text("; ".join(notes(results)))
        table = f"<p>{page.text(outcome(results))}</p>{page.sortable(*table_rows(results))}<p>{told}.</p>"
        parts.append(f"<section><h2>Methods</h2>{table}</section>")
    plot = folder / "plots" / _ERRORS
    if plot.is_file() and (address := _address_of(plot, _PLOT)):
        image = f'<img class="wide" src="{address}" alt="{_ERRORS_ALT}">'
        parts.append(f"<section><h2>Error over time</h2>{image}</section>")
    return parts


def _address_of(path: Path, size: tuple[int, int]) -> str | None:
    """Return an image, downscaled to at most this size, as a data URL; None if it cannot be read."""
    try:
        image = load_image(path)
    except FrameError:
        return None
    image.thumbnail(size, Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
