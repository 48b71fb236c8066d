import base64
import contextlib
import errno
import io
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta.errors import OutputError
from remtta.files import from_json, to_json
from remtta.pipeline.prediction import Prediction
from remtta.runs.folder import PREDICTIONS, run_folder
from remtta.runs.loop import BatchResult
from remtta.runs.pipe import RowPipe
from remtta.runs.reading import read_rows
from remtta.runs.rows import RowFormat, prediction_rows
from remtta.runs.writer import RowWriter
from remtta.streams.batches import Batch
from remtta.streams.frames import Gap
from remtta.streams.prefetch import DecodedFrame
from tests.conftest import draw_folder
from tests.records import lines_of, rows_of
from tests.runs.tiny import adapt_tiny

IMAGE = torch.zeros(3, 2, 2, dtype=torch.uint8)
LISTED: dict[str, Any] = {"logits": True}
LOGITS = torch.tensor([[1.0, 5.0, 2.0]]).log()  # probabilities 1/8, 5/8 and 2/8


def _still(index: int, source: str = "frame.png") -> DecodedFrame:
    return DecodedFrame(index, source, None, None, IMAGE)


def _unreadable(index: int) -> DecodedFrame:
    return DecodedFrame(index, "broken.png", None, None, None, "is truncated")


def _rows(frames: list[DecodedFrame], predicted: torch.Tensor | None, **changes: Any) -> list[dict[str, Any]]:
    excluded, weight = changes.pop("excluded", {}), changes.pop("weight", 1.0)
    form = RowFormat(**{"labels": ["cat", "dog", "owl"], "topk": 2, **changes})
    logits = torch.empty(0) if predicted is None else predicted
    prediction = Prediction(logits, torch.ones(len(logits), dtype=torch.bool), num_updates=3, weight=weight)
    result = BatchResult(Batch(frames), prediction, adapted=True, excluded=excluded)
    return prediction_rows(result, form)


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text()
    gap, read_at = Gap(2.0, "lost", 1), "2026-11-21T12:00:00.000+00:00"
    frame = DecodedFrame(0, "camera 0", 7, 0.5, IMAGE, gap=gap, read_at=read_at)
    rows = _rows([frame, _unreadable(1)], LOGITS, excluded={0: "black frame"}, weight=0.0, **LISTED)
    fields = {field for row in rows for field in row}
    assert len(rows) == 3 and {"gap", "attempts", "logits", "answered_by", "time", "time_s", "error"} <= fields
    assert [field for field in fields if f"`{field}`" not in page] == []


def test_a_row_has_the_fields_of_the_interface() -> None:
    (row,) = _rows([_still(12, "frames/frame_12.png")], LOGITS)
    assert row == {
        "index": 12,
        "source": "frames/frame_12.png",
        "class": 1,
        "label": "dog",
        "prob": 0.625,
        "topk": [{"class": 1, "label": "dog", "prob": 0.625}, {"class": 2, "label": "owl", "prob": 0.25}],
        # 1/8 ln 8 + 5/8 ln(8/5) + 2/8 ln 4 = 0.259930 + 0.293752 + 0.346574
        "entropy": 0.900256,
        "update": 3,
        "adapted": True,
    }
    assert list(row)[:5] == ["index", "source", "class", "label", "prob"]


def test_a_frame_that_cannot_be_read_has_its_reason_and_nothing_else() -> None:
    assert _rows([_unreadable(13)], None) == [{"index": 13, "source": "broken.png", "error": "is truncated"}]
    (row,) = _rows([DecodedFrame(2, "clip.mp4", 7, 0.28, None, "is damaged")], None)
    assert row == {"index": 2, "source": "clip.mp4", "frame": 7, "time_s": 0.28, "error": "is damaged"}


def test_logits_are_added_on_request_and_restore_every_float() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 7
    rows = _rows([_still(i) for i in range(4)], logits, labels=None, **LISTED)
    text = json.dumps([row["logits"] for row in rows])
    assert torch.equal(torch.tensor(json.loads(text)), logits)
    assert "logits" not in _rows([_still(0)], LOGITS)[0]


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e30])
def test_entropy_is_a_plain_number_between_zero_and_log_c(scale: float) -> None:
    (row,) = _rows([_still(0)], scale * torch.tensor([[1.0, -1.0, 0.0]]))
    assert 0 <= row["entropy"] <= 1.098613  # ln 3
    assert "-0.0" not in json.dumps(row["entropy"])


def test_a_row_with_nan_is_refused_and_no_part_of_its_batch_written(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    with contextlib.closing(RowWriter(path)) as writer, pytest.raises(ValueError):
        writer.write([{"index": 0}, {"index": 1, "prob": float("nan")}])
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", [b"two\nlines.png", b"caf\xe9 \xff.png", "日本 \u2028.png".encode(), b'"\\\t\x7f.png'])
def test_any_file_name_stays_one_line_and_can_be_recovered(name: bytes, tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    frames = [_still(0, os.fsdecode(name)), _still(1)]
    with contextlib.closing(RowWriter(path)) as writer:
        writer.write(_rows(frames, LOGITS.expand(2, -1), labels=["Kätzchen\n", "dog", "\udcff"]))
    text = path.read_bytes().decode("ascii")
    assert len(text.splitlines()) == 2
    json.dumps([json.loads(line) for line in text.splitlines()], ensure_ascii=False).encode()  # all of it is UTF-8
    row, stored = next(read_rows(path)), json.loads(text.splitlines()[0])
    assert os.fsencode(row["source"]) == name and "source_bytes" not in row
    assert base64.b64decode(stored.get("source_bytes", "")) == (name if "\\x" in stored["source"] else b"")
    assert [entry["label"] for entry in row["topk"]] == ["dog", "\udcff"]
    assert stored["topk"][1] == {**row["topk"][1], "label": "\\xff", "label_bytes": "/w=="}


def test_invalid_text_of_all_kinds_is_restored() -> None:
    content: dict[str, Any] = {"a": ["\udce9", "\ud800", {"b": "é\udce9", "c": "\U0001f600"}], "n_bytes": 3, "n": 1}
    text = to_json(content)
    json.dumps(json.loads(text), ensure_ascii=False).encode()
    assert from_json(text) == {**content, "a": ["\\xe9", "\\xed\\xa0\\x80", content["a"][2]]}
    with pytest.raises(ValueError):
        to_json({"source": "\udce9", "prob": float("nan")})


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The sizes that each file, by its inode, had when it was synced; other tests sync nothing."""
    sizes: dict[int, list[int]] = {}

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        sizes.setdefault(status.st_ino, []).append(status.st_size)

    monkeypatch.setattr(os, "fsync", sync)
    return sizes


@pytest.mark.parametrize("durable", [True, False])
def test_durable_rows_are_on_disk_when_write_returns(
    durable: bool, synced: dict[int, list[int]], tmp_path: Path
) -> None:
    path, sizes = tmp_path / "predictions.jsonl", []
    with contextlib.closing(RowWriter(path, durable=durable)) as writer:
        for number in range(3):
            writer.write([{"index": 2 * number}, {"index": 2 * number + 1}])
            sizes.append(path.stat().st_size)
            assert synced.get(path.stat().st_ino, []) == (sizes if durable else [])
        assert writer.sync() == synced[path.stat().st_ino][-1] == sizes[-1]


def test_a_run_has_the_rows_of_each_batch_on_disk_before_the_next(synced: dict[int, list[int]], tmp_path: Path) -> None:
    adapt_tiny(draw_folder(tmp_path / "frames", range(9)), tmp_path / "run", "source")
    path = tmp_path / "run" / PREDICTIONS
    ends = list(itertools.accumulate(len(line) for line in path.read_bytes().splitlines(keepends=True)))
    assert sorted(set(synced[path.stat().st_ino])) == ends[2::3]


class _FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_pipe_that_fails_otherwise_is_an_output_error(frames: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot be written to standard output: No space left on device"):
        adapt_tiny(frames, tmp_path / "run", callbacks=[RowPipe(_FullDisk())])
    assert len(rows_of(tmp_path / "run")) == 3


def test_rows_are_written_at_the_end_of_a_file_that_another_program_cut(tmp_path: Path) -> None:
    with contextlib.closing(RowWriter(tmp_path / "rows.jsonl")) as writer:
        writer.write([{"index": 0}])
        os.truncate(tmp_path / "rows.jsonl", 0)
        writer.write([{"index": 1}])
    assert lines_of(tmp_path / "rows.jsonl") == [{"index": 1}]


def test_runs_begun_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with contextlib.ExitStack() as runs, ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda number: runs.enter_context(run_folder(None, root)), range(40)))
        assert len(set(folders)) == 40 and all(folder.is_dir() for folder in folders)
        (folders[7] / "predictions.jsonl").touch()
    assert list(root.iterdir()) == [folders[7]]  # the others are empty, and nobody's any more


def test_a_folder_that_was_named_stays_as_it_is_and_one_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    with run_folder(tmp_path / "named") as folder:
        assert not folder.exists()
    with run_folder(None, tmp_path / "runs"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "runs")
    for root in (tmp_path / "file", tmp_path / "link"):
        with pytest.raises(OutputError, match=rf"{root.name} cannot be written: File exists"), run_folder(None, root):
            pass
