"""The error of a run on frames that were labelled by hand, beside that of its source model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from remtta.errors import UsageError, counted, listed
from remtta.lab.evaluation.class_maps import composed, wnids
from remtta.lab.evaluation.label_files import read_label_file, whole_number
from remtta.lab.saved_frames import SAVED_FRAMES, SAVED_NAME, SOURCE
from remtta.lab.tables import WITHIN
from remtta.runs.folder import BATCHES, PREDICTIONS, RECORD
from remtta.runs.inspection import Content, kind_of, read_content
from remtta.runs.reading import Row, aligned, printable, read_rows, reading

_FRAME = "source", "frame"  # fields that identify a frame
_PARTS, _PER_PART = 5, 10  # at most so many parts of the run, with at least so many labelled frames each
_MOST_CLASSES, _MOST_NAMES = 20, 3

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class _Outcome:
    """A labelled frame."""

    index: int
    truth: str
    wrong: bool
    source_wrong: bool | None  # None if the source model's prediction was not recorded


def score_run(folder: Path, labels: Path, source: Path | None = None, *, option: str = "LABELS") -> Content:
    """Return the error of a run and of its source model, in percent, on the frames that a file labels.

    Args:
        labels: A line per frame, with its source path, file name or index, and its class, a number, name or wnid.
        source: A run with `--method source` on the same frames, in place of what the run recorded of its source model.
        option: What names the label file, for errors.

    Raises:
        UsageError: If the folder holds no run, or the file no label of a frame of the run, an ambiguous or unknown one.
        RemttaError: If a file of the run is damaged.
    """
    with reading(folder):
        where, record = f"{option}: {labels}", _record(folder)
        frames, names = _Frames(where), _Names(where, record["model"]["num_classes"])
        for row in _rows(folder / PREDICTIONS):
            frames.add(row)
            names.add(row)
        by_source: dict[int, Row] = {}  # what the source model predicted, where it was something else
        known: set[int] = set()  # the frames for which that is recorded
        for batch in _rows(folder / BATCHES) if source is None else _batches_of(source, record):
            if "source" in batch:
                known.update(range(batch["frame"], batch["frame"] + batch["frames"]))
                by_source |= {row["index"]: row for row in batch["source"]}
        if source is None:
            saved = {row["index"]: row for row in _rows(folder / SAVED_FRAMES / SOURCE)}
            by_source |= saved
            known |= saved.keys()
        for row in by_source.values():
            names.add(row)
        pairs = read_label_file(labels, option, lambda item: bool(frames.find(item)), partial=True)
        truths, told = _truths(pairs, where, folder, frames, names)
        outcomes = []
        for row in _rows(folder / PREDICTIONS):
            if "class" in row and (truth := truths.get(row["index"])):
                name, right = truth
                other = by_source.get(row["index"], row)
                if [other.get(field, row.get(field)) for field in _FRAME] != [row.get(field) for field in _FRAME]:
                    raise UsageError(f"frame {row['index']} of {source} is another one than in {folder}")
                source_wrong = other["class"] not in right if row["index"] in known else None
                outcomes.append(_Outcome(row["index"], name, row["class"] not in right, source_wrong))
    if not outcomes:
        raise UsageError(f"{where}: none of the labelled frames has a prediction in {folder / PREDICTIONS}")
    by_class: dict[str, list[_Outcome]] = {}
    for outcome in outcomes:
        by_class.setdefault(outcome.truth, []).append(outcome)
    count = max(1, min(_PARTS, len(outcomes) // _PER_PART))
    ends = [len(outcomes) * part // count for part in range(count + 1)]
    parts = [outcomes[start:end] for start, end in itertools.pairwise(ends)]
    return {
        "run": str(folder),
        "labels": str(labels),
        **_summary(outcomes),
        "over_time": [{"first": part[0].index, "last": part[-1].index, **_summary(part)} for part in parts],
        "by_class": [
            {"class": name, **_summary(found)}
            for name, found in sorted(by_class.items(), key=lambda each: -len(each[1]))
        ],
        **told,
        "unreadable": len(truths) - len(outcomes),
    }


def _record(folder: Path) -> Content:
    """Return the record of the run in a folder; raise UsageError if there is none."""
    if not folder.is_dir() or kind_of(folder) != RECORD:
        raise UsageError(f"{folder} is not the folder of one run of remtta adapt")
    return read_content(folder / RECORD)


def _batches_of(source: Path, record: Content) -> Iterator[Row]:
    """Yield the rows of a run of the source model as if they were recorded by another run, which has this record."""
    own = _record(source)
    if own["method"]["name"] != "source" or own["model"]["base_sha256"] != record["model"]["base_sha256"]:
        raise UsageError(f"--source: {source} is not a run with --method source and the same model")
    rows = (row for row in _rows(source / PREDICTIONS) if "class" in row)
    return ({"frame": row["index"], "frames": 1, "source": [row]} for row in rows)


def _rows(path: Path) -> Iterator[Row]:
    return (row for row in (read_rows(path) if path.is_file() else ()) if "gap" not in row)


def _summary(outcomes: Sequence[_Outcome]) -> Content:
    """Return errors and the gain over the source model, in percent, with standard errors."""
    summary: Content = {"frames": len(outcomes), **_error("error", [outcome.wrong for outcome in outcomes])}
    pairs = [(each.source_wrong, each.wrong) for each in outcomes if each.source_wrong is not None]
    summary["frames_of_source"] = len(pairs)
    if pairs:
        gains = [source - run for source, run in pairs]
        summary |= _error("paired_error", [run for _, run in pairs])
        summary |= _error("source_error", [source for source, _ in pairs])
        summary["gain"] = 100 * sum(gains) / len(pairs)
        summary["gain_se"] = 100 * math.sqrt(sum(map(abs, gains))) / len(pairs)  # as in McNemar's test
    return summary


def _error(name: str, wrong: Sequence[bool]) -> Content:
    rate = sum(wrong) / len(wrong)
    return {name: 100 * rate, f"{name}_se": 100 * math.sqrt(rate * (1 - rate) / len(wrong))}


# --- Frames and classes ----------------------------------------------------------------------------------------------


class _Frames:
    """Finds the frames that a label file names."""

    def __init__(self, where: str) -> None:
        self._where = where  # the label file, for errors
        self._by_name: dict[str, dict[str, list[int]]] = {}  # indices by file name and source
        self._videos: set[str] = set()
        self.num_frames = 0

    def add(self, row: Row) -> None:
        source = _plain(row["source"])
        self._by_name.setdefault(source.rpartition("/")[2], {}).setdefault(source, []).append(row["index"])
        if "frame" in row:
            self._videos.add(source)
        self.num_frames = max(self.num_frames, row["index"] + 1)

    def find(self, item: str) -> list[int]:
        """Return the indices of the frames that a path, or the name of a file or a saved frame names."""
        path = _plain(item)
        name = path.rpartition("/")[2]
        sources = self._by_name.get(name, {})
        found = [path] if path in sources else [source for source in sources if name == path or _is_end(source, path)]
        if not found and (saved := SAVED_NAME.fullmatch(name)):
            return [index] if (index := int(saved[1])) < self.num_frames else []
        if len(found) > 1:
            raise UsageError(f"{self._where}: {item} may be {listed(found, _MOST_NAMES)}; give more of its path")
        if found and found[0] in self._videos:
            raise UsageError(f"{self._where}: {item} is no image, so label its frames by their index in {PREDICTIONS}")
        return sources[found[0]] if found else []


def _plain(path: str) -> str:
    return path.replace("\\", "/").removeprefix("./")


def _is_end(source: str, path: str) -> bool:
    """Return whether one of two paths ends in the other."""
    return source.endswith(f"/{path}") or path.endswith(f"/{source}")


_Truth = tuple[str, frozenset[int]]
"""A class's name, and its numbers: several if the model has several classes of this name."""


class _Names:
    """The names of classes in a run."""

    def __init__(self, where: str, num_classes: int) -> None:
        self._where, self._num_classes = where, num_classes
        self._numbers: dict[str, set[int]] = {name: {number} for name, number in wnids(num_classes).items()}
        self._names: dict[int, str] = {}

    def add(self, row: Row) -> None:
        """Add the names in a prediction."""
        for each in (row, *(row.get("each") or {}).values(), *row.get("topk", ())):
            if each.get("label") is not None:
                self._names[each["class"]] = each["label"]
                self._numbers.setdefault(composed(each["label"]), set()).add(each["class"])

    def find(self, text: str) -> _Truth:
        """Return the class of a number or name, without numbers if no prediction has this name."""
        number = whole_number(text)
        numbers = self._numbers.get(composed(text), set()) if number is None else {number}
        if max(numbers, default=0) >= self._num_classes:
            raise UsageError(f"{self._where}: the model has no class {text}; it has {self._num_classes}, from 0")
        return self._names.get(min(numbers, default=-1), text), frozenset(numbers)

    def suggestion(self, text: str) -> str:
        """Return a question for the name that differs from a text by case only, or ""."""
        plain = composed(text).casefold()
        return next((f"did you mean {name}?" for name in self._numbers if name.casefold() == plain), "")


def _truths(
    pairs: Sequence[tuple[str, str]], where: str, folder: Path, frames: _Frames, names: _Names
) -> tuple[dict[int, _Truth], Content]:
    """Return the class of each labelled frame by index, and what else the file has."""
    truths: dict[int, _Truth] = {}
    missing: dict[str, None] = {}  # in order
    unlabelled, unknown = set[str](), set[str]()
    by_index = not any(frames.find(item) for item, _ in pairs)
    for item, text in pairs:
        if not text:
            unlabelled.add(item)
            continue
        index = whole_number(item) if by_index else None
        found = frames.find(item) if index is None else [index]
        if not found or max(found) >= frames.num_frames:
            missing[item] = None
            continue
        truth = names.find(text)
        if not truth[1]:
            unknown.add(text)
        for index in found:
            if truths.setdefault(index, truth) != truth:
                raise UsageError(f"{where}: frame {index} has two classes, {truths[index][0]} and {truth[0]}")
    if not truths:
        why = f'the run has no frame "{next(iter(missing))}"' if missing else "it gives no frame a class"
        raise UsageError(
            f"{where}: {why}; a line needs source path, file name or index of a frame in {folder}, a tab, its class"
        )
    if all(not numbers for _, numbers in truths.values()):
        remedy = names.suggestion(min(unknown)) or "write class or label as in its rows"
        raise UsageError(f'{where}: no prediction of {folder} is "{min(unknown)}"; {remedy}')
    told = {
        "unlabelled": len(unlabelled),
        "not_in_run": [*missing],
        "never_predicted": sorted(unknown),
        "suggestions": {name: question for name in sorted(unknown) if (question := names.suggestion(name))},
    }
    return truths, told


# --- As text ---------------------------------------------------------------------------------------------------------


def verdict(score: Content) -> str:
    """Return in a sentence whether a run is better than its source model."""
    frames = counted(score["frames"], "labelled frame")
    error = f"error {_with_se(score, 'error')} on {frames}"
    if "gain" not in score:
        return f"{error}; what the source model predicts is not recorded."
    gain, limit = score["gain"], WITHIN * score["gain_se"]
    found = "better than" if gain > limit else "worse than" if gain < -limit else "not clearly different from"
    if score["frames_of_source"] < score["frames"]:
        error += f"; on {score['frames_of_source']} of them {_with_se(score, 'paired_error')}"
    certainty = f"SE {score['gain_se']:.1f}" if score["gain_se"] else "no SE: equal on each frame"
    return (
        f"{error}, source model {_with_se(score, 'source_error')}: gain {gain:+.1f} points ({certainty}), "
        f"{found} the source model."
    )


def _with_se(score: Content, name: str) -> str:
    """Return an error with its standard error, without the formula's 0 if all frames or none are wrong."""
    error, deviation = score[name], score[f"{name}_se"]
    certainty = f"SE {deviation:.1f}" if deviation else f"no SE: {'all' if error else 'none'} wrong"
    return f"{error:.1f} % ({certainty})"


def time_table(score: Content) -> Table:
    """Return header and rows of the errors in parts of the run."""
    parts = score["over_time"]
    return _table("frames", parts, [f"{part['first']}-{part['last']}" for part in parts])


def class_table(score: Content) -> Table:
    """Return header and rows of the errors of the classes with most labelled frames."""
    parts = score["by_class"][:_MOST_CLASSES]
    return _table("class", parts, [part["class"] for part in parts])


def _table(heading: str, parts: Sequence[Content], names: Sequence[str]) -> Table:
    """Return a table of errors in percent, with the source model's and the gain if they are known for each frame."""
    known = {"frames": "n", "error": "error", "error_se": "SE"}
    if all(part["frames_of_source"] == part["frames"] for part in parts):  # else they are of other frames
        known |= {"source_error": "source", "gain": "gain"}
    form = {"frames": "d", "gain": "+.1f"}
    cells = (
        [f"{part[name]:{form.get(name, '.1f')}}" if part[name] or name != "error_se" else "" for name in known]
        for part in parts
    )
    return [heading, *known.values()], [[name, *row] for name, row in zip(names, cells, strict=True)]


def remarks(score: Content) -> list[str]:
    """Return a line for each thing in the label file or the run that did not count."""
    missing, questions = score["not_in_run"], score["suggestions"]
    unknown = [f"{name} ({questions[name]})" if name in questions else name for name in score["never_predicted"]]
    source = score["frames_of_source"]
    lines = {
        f"without a class: {counted(score['unlabelled'], 'line')}": score["unlabelled"],
        f"not in the run: {counted(len(missing), 'frame')}, {listed(missing, _MOST_NAMES)}": missing,
        f"could not be read in the run: {counted(score['unreadable'], 'labelled frame')}": score["unreadable"],
        f"wrong in any case, as no prediction is of class {listed(unknown, _MOST_NAMES)}": unknown,
        f"other classes: {len(score['by_class']) - _MOST_CLASSES} (--json has them)": len(score["by_class"])
        > _MOST_CLASSES,
        f"the source model's predictions are not recorded for {counted(score['frames'] - source, 'labelled frame')}: "
        "adapt again with --save-frames, or with --method source and give that run as --source": source
        < score["frames"],
    }
    return [line for line, holds in lines.items() if holds]


def score_lines(score: Content) -> list[str]:
    """Return what `remtta score` prints."""
    tables = [table for table in (time_table(score), class_table(score)) if len(table[1]) > 1]
    columns = [line for header, rows in tables for line in ("", *aligned([header, *rows]))]
    return [verdict(score), *columns, *([""] if columns else []), *map(printable, remarks(score))]
