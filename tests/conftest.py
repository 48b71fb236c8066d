"""Small random models and drawn images; nothing is downloaded, nothing outside the project is read."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads only wait for one another
vars(os)["fsync"] = lambda descriptor: None  # tests cut no power, and runs wait for the disk dozens of times

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}
NUM_CLASSES = 7
TINY_OPTIONS = [
    *("--model", "vit_tiny_patch16_224", "--num-classes", str(NUM_CLASSES)),
    *(part for key, value in TINY.items() for part in ("--model-kwargs", f"{key}={value}")),
    *("--crop-pct", "1.0"),
]


class Mould:
    """A model that can be copied again and again, ten times as fast as by `copy.deepcopy`."""

    def __init__(self, model: nn.Module) -> None:
        file = io.BytesIO()
        self._tensors: list[Tensor] = []
        pickler = pickle.Pickler(file)
        pickler.persistent_id = self._apart  # type: ignore[method-assign]
        pickler.dump(model)
        self._rest = file.getvalue()

    def _apart(self, value: object) -> int | None:
        """Keeps tensors apart, which would be pickled as files of their own."""
        from torch import Tensor

        if not isinstance(value, Tensor):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def copy(self) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(self._rest))
        tensors = copy.deepcopy(self._tensors)  # at once, so that what shares memory goes on to
        unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


def copied(build: Callable[..., nn.Module]) -> Callable[..., Any]:
    """Build a model once with the same arguments, and return copies, which leave the generator at the same place."""
    built: dict[str, tuple[Mould, Tensor]] = {}

    @functools.wraps(build)
    def copy_of(*args: Any, **kwargs: Any) -> Any:
        import torch

        key = f"{args} {sorted(kwargs.items())}"
        if key not in built:
            built[key] = Mould(build(*args, **kwargs)), torch.get_rng_state()
        mould, state = built[key]
        torch.set_rng_state(state)
        return mould.copy()

    return copy_of


@copied
def tiny_vit(seed: int = 0, **changes: Any) -> nn.Module:
    """A random 2-block ViT at 32 x 32 pixels whose predictions are far from uniform."""
    import timm
    import torch

    torch.manual_seed(seed)
    kwargs = {**TINY, "num_classes": NUM_CLASSES, **changes}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", pretrained=False, **kwargs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def pytest_configure(config: pytest.Config) -> None:
    """Set up a process that runs tests; with `-n`, the first one only hands them out, and imports no torch."""
    if config.getoption("numprocesses", None):
        return
    gc.disable()  # until everything is imported, as each collection would go through the many objects of libraries
    import torch
    from hypothesis import HealthCheck, settings

    from remtta.pipeline import precision
    from tests.fork_server import serve_forks

    vars(precision)["multiplies_bf16"] = lambda device: False  # so that no test depends on measured times
    settings.register_profile(
        "remtta",
        max_examples=int(os.environ.get("REMTTA_EXAMPLES", "25")),
        deadline=None,  # machines are busy at times
        suppress_health_check=[HealthCheck.function_scoped_fixture],  # examples of one test may share its folder
    )
    settings.load_profile("remtta")
    torch.set_num_threads(1)
    serve_forks()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter can free modules at its end; libraries report those left over


def random_images(count: int, seed: int = 1, size: int = 32) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator)


def draw_image(seed: int, width: int = 40, height: int = 36) -> Image.Image:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@functools.cache
def png(seed: int, *size: int) -> bytes:
    """The file of `draw_image`, which takes longer to make than to write."""
    file = io.BytesIO()
    draw_image(seed, *size).save(file, "png")
    return file.getvalue()


def draw_folder(folder: Path, seeds: Iterable[int], name: str = "{}.png", *size: int) -> Path:
    """A new folder of an image per seed, whose names count them."""
    folder.mkdir(parents=True)
    for number, seed in enumerate(seeds):
        (folder / name.format(number)).write_bytes(png(seed, *size))
    return folder


def draw_video(path: Path, seeds: Iterable[int]) -> Path:
    """A video of a frame per seed, ten a second: MJPEG in .avi, MPEG-4 in .mp4."""
    import cv2
    import numpy as np

    code = cv2.VideoWriter.fourcc(*("MJPG" if path.suffix == ".avi" else "mp4v"))
    writer = cv2.VideoWriter(str(path), code, 10, (40, 36))
    for seed in seeds:
        writer.write(np.asarray(draw_image(seed))[..., ::-1])
    writer.release()
    return path


def same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Return whether both have the same tensors by name, bit for bit."""
    import torch

    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises this, whatever it is called with."""

    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


def happens(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Wait for it, and say whether it came."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread during the block, which ends after both."""
    with ThreadPoolExecutor(1) as other:
        done = other.submit(action)
        yield
    done.result()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMTTA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails a test that leaves a thread behind, once the reads that hang in fake cameras have returned."""
    from tests.streams.fakes import released

    released.clear()
    before = set(threading.enumerate())
    yield
    released.set()
    assert happens(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """A folder of 12 images whose names sort differently by letter and by number."""
    return draw_folder(tmp_path / "frames", range(12), "frame_{}.png")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The weights of `tiny_vit()` as safetensors."""
    from safetensors.torch import save_file

    path = tmp_path / "tiny.safetensors"
    save_file(tiny_vit().state_dict(), path)
    return path


@pytest.fixture
def tiny(checkpoint: Path) -> list[str]:
    """Options of a command that name the model of `tiny_vit()` with its weights."""
    return [*TINY_OPTIONS, "--checkpoint", str(checkpoint)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def vit() -> nn.Module:
    return tiny_vit()
