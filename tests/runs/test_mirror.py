"""A folder with a copy in a store: what the store has can be gone on with at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from remtta.errors import OutputError
from remtta.evaluation import evaluate, grid
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.grid import RECORDS, RUNS
from remtta.methods import rem as rem_module
from remtta.methods.rem import rem_loss
from remtta.methods.settings import REMConfig
from remtta.options import EvalOptions
from remtta.runs import mirror as mirror_module
from remtta.runs.mirror import Mirror
from tests.conftest import tiny_vit
from tests.evaluation.test_resume import without_timing
from tests.evaluation.trees import open_tree, write_tree
from tests.records import parsed, rows_of

TABLE = "memory://lab/table1"


@pytest.fixture
def tree(tmp_path: Path) -> Dataset:
    return open_tree(write_tree(tmp_path / "c", ["gaussian_noise", "fog"], each=2))


def measure(tree: Dataset, folder: Path, mirror: Mirror | None = None, **changes: Any) -> dict[str, Any]:
    methods = {"source": None, "rem+guard": REMConfig(lr=0.02)}
    options = EvalOptions(batch_size=5, save_every_s=0.0, **changes)
    return evaluate(tiny_vit(), tree, folder, methods=methods, options=options, mirror=mirror)


class _Die(BaseException):
    """Stands for kill -9: nothing more is sent."""


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_an_evaluation_kept_in_a_store_goes_on_elsewhere(
    engine: str, memory: dict[str, Any], tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(work: Any, shared: Any, tasks: Sequence[Any], **options: Any) -> Iterator[tuple[int, Any]]:
        return ((position, work(shared, task, lambda: False)) for position, task in enumerate(tasks))

    monkeypatch.setattr(grid, "in_processes", in_this_process)
    monkeypatch.setattr(mirror_module, "_EVERY_S", 0.0)
    left, calls = Mirror.__exit__, 0

    def dying(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            monkeypatch.setattr(Mirror, "__exit__", lambda *raised: None)
            raise _Die
        return rem_loss(*args)

    monkeypatch.setattr(rem_module, "rem_loss", dying)
    with pytest.raises(_Die), Mirror(TABLE, records=RECORDS, apart=(RUNS,)) as mirror:
        measure(tree, mirror.folder, mirror, engine=engine)
    monkeypatch.setattr(Mirror, "__exit__", left)
    assert any(
        b'"source"' in bytes(file.getvalue()) for name, file in memory.items() if name.endswith("predictions.jsonl")
    )

    remove = Mirror.remove

    def checked(self: Mirror, folder: Path) -> None:
        kept = len(parsed(memory["/lab/table1/predictions.jsonl"].getvalue()))
        assert kept == 2 * 28 or not any("/.runs/" in name for name in memory)  # two methods' rows
        remove(self, folder)

    monkeypatch.setattr(Mirror, "remove", checked)
    with Mirror(TABLE, records=RECORDS, apart=(RUNS,)) as mirror:
        monkeypatch.setattr(mirror_module, "_EVERY_S", 30.0)
        made = measure(tree, mirror.folder, mirror, engine=engine, resume=True)
    assert calls < 4 + 6  # it went on, and did not begin anew
    assert not mirror.folder.exists() and not any("/.runs/" in name or "/.progress" in name for name in memory)
    wanted = measure(tree, tmp_path / "here")
    assert parsed(memory["/lab/table1/predictions.jsonl"].getvalue()) == rows_of(tmp_path / "here")
    assert without_timing(made) == without_timing(wanted)


def test_what_is_gone_here_goes_there_and_what_cannot_be_sent_stays_here(
    memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Mirror(TABLE, records=RECORDS) as mirror:
        for name in ("results.json", "deltas/a", ".lock", ".x.1.tmp"):
            (mirror.folder / name).parent.mkdir(exist_ok=True)
            (mirror.folder / name).write_text("x")
    assert sorted(memory) == ["/lab/table1/deltas/a", "/lab/table1/results.json"]

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("over\nquota")

    monkeypatch.setattr(mirror_module, "_EVERY_S", 0.0)
    told = f"{TABLE}: over quota; the results are in"
    with pytest.raises(OutputError, match=told) as raised, Mirror(TABLE, records=RECORDS) as mirror:
        assert (mirror.folder / "deltas/a").read_text() == "x"
        (mirror.folder / "deltas/a").unlink()
        mirror.send_if_due()
        (mirror.folder / "deltas/b").write_text("y")
        monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
        mirror.send_if_due()
        assert "over quota; trying again later" in caplog.text
    assert str(mirror.folder) in str(raised.value) and (mirror.folder / "deltas/b").exists()
    assert sorted(memory) == ["/lab/table1/results.json"]
