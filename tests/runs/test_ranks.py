"""One stream on several processes: the same as on one, whoever of them goes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from remtta import load_delta
from remtta.deltas import DELTA
from remtta.errors import RemttaError, UsageError
from remtta.methods.gradient import GradientMethod
from remtta.methods.registry import build_method
from remtta.methods.settings import METHOD_CONFIGS, REMConfig
from remtta.methods.shares import EvenShares
from remtta.options import RunOptions
from remtta.runs.adapt import adapt_stream
from remtta.runs.interrupts import Interrupts
from remtta.runs.ranks import Ranks
from remtta.runs.summary import RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.command import Started
from tests.conftest import TINY_OPTIONS, draw_image, random_images, tiny_vit
from tests.records import record_of, rows_of

BATCH = 3
NUM_BATCHES = 22
KILLED_AFTER = 20


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What torchrun would have set, of the first of two processes here, and for the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    for name, value in {**shared, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    yield {**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1"}


def stream() -> Stream:
    """Batches of three, for two processes; of the sixth only one frame is learned from, as two are black."""
    black = Image.new("RGB", (40, 36))
    frames = (
        Frame("clip", partial(draw_image, number) if number not in (15, 17) else lambda: black, number=number)
        for number in range(BATCH * NUM_BATCHES)
    )
    return Stream("clip", "video", frames)


def assert_same_run(folder: Path, wanted: Path) -> None:
    rows, alone = rows_of(folder), rows_of(wanted)
    assert [row["source"] for row in rows] == [row["source"] for row in alone]
    assert [row["update"] for row in rows] == [row["update"] for row in alone]
    got, logits = (torch.tensor([row["logits"] for row in each]) for each in (rows, alone))
    torch.testing.assert_close(got, logits, atol=1e-5, rtol=0)
    assert record_of(folder)["counts"] == record_of(wanted)["counts"]
    delta, expected = load_delta(folder / DELTA).tensors, load_delta(wanted / DELTA).tensors
    for name, tensor in expected.items():
        torch.testing.assert_close(delta[name], tensor, atol=1e-5, rtol=0)


def test_two_processes_come_to_what_one_does_and_one_goes_on_when_the_other_dies(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options = RunOptions(batch_size=BATCH, logits=True, memory=3, adapt="auto")
    save_file(tiny_vit().state_dict(), tmp_path / "tiny.safetensors")
    model = [*TINY_OPTIONS, "--checkpoint", str(tmp_path / "tiny.safetensors")]
    how = ["-b", str(BATCH), "--memory", "3", "--adapt", "auto"]
    other = Started("adapt", "not-read-here", *model, *how, env=environment)

    def kill(summary: RunSummary) -> None:
        if summary.num_frames == BATCH * KILLED_AFTER:
            other.kill()
            assert other.communicate()[1] == b""

    gone = pytest.raises(RemttaError, match="another process of this run is gone")
    with other, Ranks("cpu", Interrupts()) as ranks, gone:
        adapt_stream(tiny_vit(), stream(), tmp_path / "run", options=options, ranks=ranks, on_batch=kill)
    assert record_of(tmp_path / "run")["exit_reason"].startswith("error: another process")
    assert record_of(tmp_path / "run")["counts"]["frames"] == BATCH * KILLED_AFTER

    going_on = RunOptions(batch_size=BATCH, logits=True, memory=3, adapt="auto", resume=True)
    adapt_stream(tiny_vit(), stream(), tmp_path / "run", options=going_on)
    adapt_stream(tiny_vit(), stream(), tmp_path / "alone", options=options)
    assert record_of(tmp_path / "alone")["counts"]["not_adapted"] == 2 + 21  # unfit ones, and a block of the same
    assert_same_run(tmp_path / "run", tmp_path / "alone")


class Rows:
    """What threads hand to one another."""

    def __init__(self, num_ranks: int) -> None:
        self.rows: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(num_ranks, timeout=60)


class ThreadShares(EvenShares):
    """Shares of threads."""

    def __init__(self, rank: int, num_ranks: int, among: Rows) -> None:
        super().__init__(rank, num_ranks)
        self._among = among

    def _of_all(self, rows: Tensor) -> list[Tensor]:
        self._among.rows[self.rank] = rows.clone()
        self._among.barrier.wait()
        found = [self._among.rows[rank] for rank in range(self.num_ranks)]
        self._among.barrier.wait()
        return found

    def _sum(self, numbers: Tensor) -> None:
        numbers.copy_(torch.stack(self._of_all(numbers)).sum(0))


NUM_RANKS = 3
SIZES = (5, 2, 7)


def adapted(method: GradientMethod) -> list[Tensor]:
    """The logits of batches of all sizes, the last with its answer ahead of the update, and of the source."""
    logits = [method(random_images(size, seed=size)) for size in SIZES]
    ahead = method.answer(random_images(4, seed=9))
    method.learn()
    return [*logits, ahead, method.predict(random_images(2)), method.predict_source(random_images(4))]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pseudo-label", {"threshold": 0.4}),
        ("eta", {"entropy_margin": 0.8, "max_cosine": 0.05}),
        ("sar", {"entropy_margin": 0.8}),
        ("tent", {"steps": 2, "episodic": True}),
        ("rem", {"confident_below": 0.8, "micro_batch": 2}),
        ("rem-come", {"gap_weighting": True, "anchor": 0.1}),
    ],
)
def test_shares_of_batches_of_any_size_teach_what_the_batches_do(name: str, changes: dict[str, Any]) -> None:
    config = replace(METHOD_CONFIGS[name](), lr=0.01, **changes)

    def method() -> GradientMethod:
        built = build_method(name, tiny_vit(), config)
        assert isinstance(built, GradientMethod)
        return built

    among, found = Rows(NUM_RANKS), dict[int, list[Tensor]]()
    methods = [method() for _ in range(NUM_RANKS)]

    def work(rank: int) -> None:
        methods[rank].divide(ThreadShares(rank, NUM_RANKS, among))
        found[rank] = adapted(methods[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = method()
    wanted = adapted(alone)
    assert methods[0].num_updates == alone.num_updates > 0
    for rank in range(NUM_RANKS):
        torch.testing.assert_close(found[rank], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("roid", "against the rest of its batch"),
        ("deyo", "random numbers"),
        ("cotta", "otherwise than norms"),
        ("rem", "random numbers"),
    ],
)
def test_what_would_not_be_the_same_is_refused(name: str, reason: str) -> None:
    method = build_method(name, tiny_vit(), REMConfig(masking="random") if name == "rem" else None)
    assert isinstance(method, GradientMethod)
    with pytest.raises(UsageError, match=reason):
        method.divide(ThreadShares(0, 2, Rows(2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_process_on_a_gpu_comes_to_what_is_without_torchrun(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    options = RunOptions(batch_size=BATCH, logits=True)
    with Ranks("cuda", Interrupts()) as ranks:
        adapt_stream(tiny_vit().cuda(), stream(), tmp_path / "run", options=options, ranks=ranks)
    adapt_stream(tiny_vit().cuda(), stream(), tmp_path / "alone", options=options)
    assert_same_run(tmp_path / "run", tmp_path / "alone")
