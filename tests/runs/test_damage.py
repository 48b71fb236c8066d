"""Damage to a run's files is reported, and repaired where possible."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta.errors import OutputError, RemttaError, UsageError
from remtta.interrupts import Interrupts, Stopped
from remtta.models.tensor_files import read_tensors, save_tensors
from remtta.pipeline.pipeline import Pipeline
from remtta.runs.folder import PREDICTIONS, RECORD, STATE
from remtta.runs.reading import read_rows
from remtta.runs.run_writer import RunWriter
from remtta.runs.saving import load_position, save_state
from remtta.runs.summary import RunProgress
from tests.conftest import raising
from tests.records import assert_same_results, json_of, record_of, rows_of
from tests.runs.tiny import adapt_tiny, camera, made_run


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_a_row(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"class": ', b'"class":9', 1))


def forget_the_place(path: Path) -> None:
    save_tensors(path, read_tensors(path)[1], {"position": "[]"})


def entry(name: str, value: object, path: Path) -> None:
    content, (*groups, last) = json_of(path), name.split(".")
    (content[groups[0]] if groups else content)[last] = value
    path.write_text(json.dumps(content))


def other_state(name: str, value: Any, path: Path) -> None:
    """Change an entry of the state or, after "place.", of the position; None leaves it out."""
    place, state = load_position(path, RunProgress)
    content = vars(place) if name.startswith("place.") else state
    content[name.removeprefix("place.")] = value
    if value is None:
        del content[name.removeprefix("place.")]
    save_state(path, vars(place), state)


OTHER_VERSION = "^the state in .*run was written by another version of remtta; start again with --overwrite$"


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        (STATE, flip_a_bit, r"its content does not match its checksum.; start again with --overwrite"),
        (STATE, forget_the_place, r"state\.safetensors is damaged \(it holds no position\); start again"),
        (PREDICTIONS, change_a_row, r"predictions.jsonl was changed since it was saved; restore it, or start"),
        (PREDICTIONS, lambda path: path.write_text(""), "has lost lines"),
        (RECORD, partial(entry, "resumed", "abc"), r"run.json is damaged \(its resumed is of type str\); start"),
        (RECORD, partial(entry, "timing", []), r"run.json is damaged \(its timing is of type list\); start"),
        (RECORD, partial(entry, "timing", None), r"run.json is damaged \(its timing is of type NoneType\); start"),
        (RECORD, partial(entry, "options", [1]), r"run.json is damaged \(its options is of type list\); start"),
        (RECORD, partial(entry, "options.share", 0.1), "settings the run began with: .*share was 0.1, is null"),
        (RECORD, partial(entry, "method.name", "tda"), "method that the run began with: it was tda, is rem"),
        (RECORD, Path.unlink, r"has lost its run\.json, so it cannot be resumed; --overwrite"),
        (STATE, partial(other_state, "guard.warned", None), OTHER_VERSION),  # of a version before it
        (STATE, partial(other_state, "guard.clock", torch.zeros(2)), OTHER_VERSION),
        (STATE, partial(other_state, "updates", None), OTHER_VERSION),
        (STATE, partial(other_state, "generator", torch.zeros(3, dtype=torch.uint8)), OTHER_VERSION),
        (STATE, partial(other_state, "novelty", torch.tensor(1.0)), OTHER_VERSION),
        (STATE, partial(other_state, "place.gaps", None), OTHER_VERSION),
    ],
)
def test_damage_is_reported_and_nothing_is_written(
    name: str, damage: Callable[[Path], object], told: str, frames: Path, tmp_path: Path
) -> None:
    damage(made_run(frames, tmp_path / "run", "stopped") / name)
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(UsageError, match=told):
        adapt_tiny(frames, tmp_path / "run", resume=True, options={"max_memory": 10**12})
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_a_state_in_a_folder_whose_name_is_not_utf8_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "run\udcff"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("names are UTF-8 here")
    save_state(folder / STATE, {}, {})
    with pytest.raises(RemttaError, match="cannot be read: its path is not valid UTF-8; rename it"):
        load_position(folder / STATE, RunProgress)


@pytest.mark.parametrize("kill", [0, 2], ids=["before the first save", "after a save"])
def test_frames_of_rows_after_the_last_save_must_come_again(kill: int, frames: Path, tmp_path: Path) -> None:
    folder = made_run(frames, tmp_path / "run", f"killed{kill}")
    names = [frames / f"frame_{number}.png" for number in range(12)]
    before, place = (folder / PREDICTIONS).read_bytes(), load_position(folder / STATE, RunProgress)[0].frames
    swapped = [*names[: place + 1], names[place + 2], names[place + 1], *names[place + 3 :]]
    message = rf"frame {place + 1} of .*frame_{place + 2}\.png, and was .*frame_{place + 1}\.png"
    with pytest.raises(UsageError, match=message):
        adapt_tiny(swapped, folder, resume=True)
    with pytest.raises(UsageError, match=rf"holds {place + 1} frames?, and the run had seen {place + 3}"):
        adapt_tiny(names[: place + 1], folder, resume=True)
    assert (folder / PREDICTIONS).read_bytes() == before
    adapt_tiny(names, folder, resume=True)
    assert_same_results(folder, frames.parent / "whole")


@pytest.mark.parametrize("damage", [b'{"index": 7, "sou\n', b"[1]\n", b"\xff\xfe\n"])
def test_damaged_lines_after_the_last_save_are_made_again(
    damage: bytes, frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made_run(frames, tmp_path / "run", "killed2")  # saved after the second batch, and one more written
    place, _ = load_position(folder / STATE, RunProgress)
    path = folder / PREDICTIONS
    lines = path.read_bytes()[place.num_bytes :].splitlines(keepends=True)
    path.write_bytes(path.read_bytes()[: place.num_bytes] + lines[0] + damage + lines[2])
    adapt_tiny(frames, folder, resume=True)
    assert path.read_bytes() == (tmp_path / "run" / PREDICTIONS).read_bytes()
    assert "writing 2 damaged lines at the end of predictions.jsonl again" in caplog.text
    assert "another machine" not in caplog.text


def test_damaged_lines_of_a_live_source_are_not_let_go_of(tmp_path: Path) -> None:
    adapt_tiny(camera(6), tmp_path / "run")
    path = tmp_path / "run" / PREDICTIONS
    with open(path, "ab") as file:
        file.write(b'{"torn": \n{"index": 6}\n')
    content = path.read_bytes()
    with pytest.raises(UsageError, match=r"the last 2 lines of .*predictions.jsonl cannot be read; repair or remove"):
        adapt_tiny(camera(3), tmp_path / "run", resume=True)
    assert path.read_bytes() == content


def test_the_record_counts_rows_that_an_earlier_part_promised(frames: Path, tmp_path: Path) -> None:
    folder = made_run(frames, tmp_path / "run", "killed2")
    assert len(rows_of(folder)) == 9 and load_position(folder / STATE, RunProgress)[0].frames == 6
    source = [frames / f"frame_{number}.png" for number in range(12)]
    with Interrupts() as interrupts:
        interrupts.check = raising(Stopped(15))  # type: ignore[method-assign]
        adapt_tiny(source, folder, resume=True, interrupts=interrupts)
    record = record_of(folder)
    assert record["exit_reason"] == "SIGTERM" and record["counts"]["frames"] == len(rows_of(folder)) == 9
    assert record["timing"]["images_per_s"] == pytest.approx(6 / record["timing"]["seconds"], rel=0.02)  # saved ones
    adapt_tiny(source, folder, resume=True)
    assert (folder / PREDICTIONS).read_bytes() == (tmp_path / "run" / PREDICTIONS).read_bytes()
    assert record_of(folder)["counts"] == record_of(tmp_path / "run")["counts"]


def test_a_state_that_cannot_be_read_is_no_wrong_use(frames: Path, tmp_path: Path) -> None:
    path = made_run(frames, tmp_path / "run", "stopped") / STATE
    path.unlink()
    path.mkdir()
    with pytest.raises(RemttaError, match=r"state\.safetensors cannot be read: it is not a regular file") as refused:
        adapt_tiny(frames, tmp_path / "run", resume=True)
    assert not isinstance(refused.value, UsageError)


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"index": 0}\n[1]\n')
    with pytest.raises(RemttaError, match="line 2 is damaged: it is not a JSON object"):
        list(read_rows(path))
    path.write_bytes(b'{"index": 0}\n{"ind')  # the last one is still being written
    assert list(read_rows(path)) == [{"index": 0}]


def test_memory_is_no_matter_for_methods_that_train_no_weights(
    frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapt_tiny(frames, tmp_path / "run", "source", options={"max_memory": 2**30})
    assert "--max-memory has no effect" in caplog.text
    assert "micro_batch" not in record_of(tmp_path / "run")["method"]


def test_an_event_that_cannot_be_written_loses_no_rows(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OutputError("events.jsonl cannot be written: No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "events", lambda pipeline: [{"event": "doubt"}])
        patch.setattr(RunWriter, "write_event", raising(full))
        with pytest.raises(OutputError):
            adapt_tiny(frames, tmp_path / "run")
    adapt_tiny(frames, tmp_path / "run", resume=True)
    assert [row["index"] for row in rows_of(tmp_path / "run")] == list(range(12))
