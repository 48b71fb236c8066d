"""One stream on many devices: processes of torchrun that take a share of each batch, led by the first.

The first process has the stream, the run's files and all decisions. It tells the others each call of its adapter, and
they make the same call of theirs, on the same images. Inside, each goes through its share of them, and gradients are
added up and logits gathered, so that all go on with the same weights. Nothing else of remtta knows torch.distributed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from remtta.errors import RemttaError, UsageError
from remtta.methods.gradient import GradientMethod
from remtta.methods.shares import EvenShares
from remtta.models.devices import select_device
from remtta.runs.adapter import Adapter
from remtta.runs.interrupts import Interrupts

_WAIT = timedelta(days=365)  # for the next frame of a camera; who dies is noticed by the lost connection
_POLL_S = 0.0001
_GRACE_S = 5.0  # a GPU waits for a dead one for ever; torchrun kills 30 s after its signal


class Ranks(EvenShares):
    """The processes that torchrun started, as long as they are connected; a context manager.

    Args:
        device: Where the model is to be; of several GPUs each process takes its own.
        interrupts: Signals, which the others leave to the first.

    Raises:
        RemttaError: If they find no connection.
    """

    def __init__(self, device: str, interrupts: Interrupts) -> None:
        on_gpu = select_device(device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        with _connected():
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_WAIT)
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._interrupts = interrupts
        self._torn = False  # in the middle of a call, so that the others do not hear of another
        self._led = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._led and not self._torn:
            with contextlib.suppress(RemttaError):  # the run is saved, whether they are still there or not
                self._tell(None)
        dist.destroy_process_group()

    def lead(self, adapter: Adapter, base_sha256: str) -> Adapter:
        """An adapter whose calls all processes make, each on its own copy of the model with these source weights.

        Raises:
            UsageError: If its method cannot share its batches.
            RemttaError: If a process is gone.
        """
        method = self._divided(adapter)
        self._tell((base_sha256, method.micro_batch, _core_state(adapter)))
        self._led = True
        return _LeadingAdapter(adapter, self)

    def follow(self, adapter: Adapter, base_sha256: str) -> None:
        """Make the calls that the first process tells, until there are no more.

        Raises:
            UsageError: If the method cannot share its batches.
            RemttaError: If a process is gone, or the first has other source weights.
        """
        method = self._divided(adapter)
        with self._interrupts.finishing():  # a signal is the first process's business
            wanted, method.micro_batch, state = self._hear()
            if wanted != base_sha256:
                raise RemttaError(f"process {self.rank} has other weights than the first; give all the same checkpoint")
            adapter.take_back(Path(), state)
            while (call := self._hear()) is not None:
                name, shape, arguments = call
                images = () if shape is None else (self._passed(torch.empty(shape, device=method.device)),)
                getattr(adapter, name)(*images, **arguments)
                adapter.events()  # the first process has them, too

    def _divided(self, adapter: Adapter) -> GradientMethod:
        method = adapter.method
        if not isinstance(method, GradientMethod):
            raise UsageError(
                f"several processes share gradients, and {type(method).__name__} has none; run it without torchrun"
            )
        method.divide(self)
        return method

    @contextlib.contextmanager
    def call(self, name: str, images: Tensor | None = None, **arguments: object) -> Iterator[None]:
        """Have the others make a call of their adapters, while the first makes it within the block."""
        self._torn = True
        self._tell((name, None if images is None else images.shape, arguments))
        if images is not None:
            self._passed(images.contiguous())
        yield
        self._torn = False

    def _of_all(self, rows: Tensor) -> list[Tensor]:
        found = [torch.empty_like(rows) for _ in range(self.num_ranks)]
        self._wait(lambda: dist.all_gather(found, rows, async_op=True), rows)
        return found

    def _sum(self, numbers: Tensor) -> None:
        self._wait(lambda: dist.all_reduce(numbers, async_op=True), numbers)

    def _tell(self, what: object) -> None:
        with _connected():
            dist.broadcast_object_list([what], src=0, device=torch.device("cpu"))

    def _hear(self) -> Any:
        heard: list[Any] = [None]
        with _connected():
            dist.broadcast_object_list(heard, src=0, device=torch.device("cpu"))
        return heard[0]

    def _passed(self, images: Tensor) -> Tensor:
        self._wait(lambda: dist.broadcast(images, src=0, async_op=True), images)
        return images

    def _wait(self, begin: Callable[[], Any], tensor: Tensor) -> None:
        """Wait for the others; for GPUs in Python, where a signal is heard that comes since one of them is gone."""
        signalled_at = None
        with _connected():
            work = begin()
            while tensor.is_cuda and not work.is_completed():
                if self._interrupts.pending:
                    signalled_at = signalled_at or time.monotonic()
                    if time.monotonic() - signalled_at > _GRACE_S:
                        raise RuntimeError("it does not answer")
                time.sleep(_POLL_S)
            work.wait()


class _LeadingAdapter(Adapter):
    """An adapter that other processes have the likes of, which make the same calls."""

    def __init__(self, alone: Adapter, ranks: Ranks) -> None:
        super().__init__(alone.method, alone.guard, alone.smoother, alone.estimator, alone.memory, alone.pace)
        self._ranks, self.num_processes = ranks, ranks.num_ranks

    def predict(
        self, pixels: Tensor, fit: Tensor | None = None, labels: Tensor | None = None, *, later: bool = False
    ) -> Tensor:
        with self._ranks.call("predict", pixels, fit=fit, later=later):
            return super().predict(pixels, fit, later=later)

    def recall(self, pixels: Tensor, fit: Tensor, behind: tuple[int, int]) -> tuple[int, int]:
        if self.memory is None:
            return behind
        with self._ranks.call("recall", pixels, fit=fit, behind=behind):
            return super().recall(pixels, fit, behind)

    def learn(self) -> None:
        with self._ranks.call("learn"):
            super().learn()

    def reset(self) -> None:
        with self._ranks.call("reset"):
            super().reset()

    def take_back(self, path: Path, state: Mapping[str, Tensor]) -> None:
        super().take_back(path, state)
        with self._ranks.call("take_back", path=path, state=_core_state(self)):
            pass


def _core_state(adapter: Adapter) -> dict[str, Tensor]:
    """What decides over weights: the method's, the guard's, the memory's, but nothing of those who only answer."""
    return Adapter(adapter.method, adapter.guard, memory=adapter.memory).state()


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """What is raised where another process has gone."""
    try:
        yield
    except RuntimeError as error:  # which torch.distributed's are
        raise RemttaError(
            "another process of this run is gone, or cannot be reached (--debug shows how); the same command with "
            "--resume goes on, with as many processes as you like"
        ) from error
