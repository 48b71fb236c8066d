"""The memory for decoding a picture."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from remtta import Preprocessing, open_stream
from remtta.errors import FrameError
from remtta.streams import decoding_memory
from remtta.streams.decoding_memory import CURRENT_MEMORY, PictureMemory, decoding_bytes
from remtta.streams.images import load_image
from remtta.streams.prefetch import DecodedFrame, prefetch
from tests.conftest import draw_image

MIB = 2**20


def decoded(max_bytes: int, *paths: Path) -> list[DecodedFrame]:
    transform = Preprocessing(*PREPROCESSING).transform()
    return list(prefetch(open_stream(paths).frames, transform, ahead=8, max_bytes=max_bytes))


PREPROCESSING = ((32, 32), (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, "center")


@pytest.mark.parametrize(
    ("limit", "total", "expected"),
    [
        (8 * 2**30, 0, 2048),
        (100 * MIB, 0, 256),  # a photograph has to fit
        (None, 64 * 2**30, 2048),
        (None, 4 * 2**30, 1024),
        (None, 512 * MIB, 256),
        (None, 0, 1024),
    ],
)
def test_it_is_a_quarter_of_the_limit_or_of_the_machines_memory(
    limit: int | None, total: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_memory, "machine_bytes", lambda: total)
    assert decoding_bytes(limit) == expected * MIB


def test_large_pictures_are_decoded_one_at_a_time_and_small_ones_beside_them() -> None:
    together, most = Counter[bool](), Counter[bool]()
    lock, gate = threading.Lock(), threading.Event()

    def decode(num_bytes: int) -> None:
        is_large = num_bytes > 10
        with PictureMemory(160) as memory:
            memory.reserve(num_bytes, 1, 1)
            with lock:
                together[is_large] += 1
                most[is_large] = max(most[is_large], together[is_large])
            gate.wait(0.05)
            with lock:
                together[is_large] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, [160, 10, 60, 5, 100, 11, 1, 99] * 3))
    assert most[True] == 1 and most[False] > 1


def test_a_large_picture_that_fails_makes_room_for_the_next() -> None:
    def decode() -> None:
        with PictureMemory(160) as memory:
            memory.reserve(160, 1, 1)
            raise FrameError("cut")

    with ThreadPoolExecutor(2) as pool:
        assert [str(pool.submit(decode).exception(5)) for _ in range(4)] == ["cut"] * 4
    assert CURRENT_MEMORY.get() is None


def test_what_exceeds_it_is_an_unreadable_frame_that_says_so(tmp_path: Path) -> None:
    for name, size in (("small.png", (100, 100)), ("large.png", (2000, 1000))):
        Image.new("RGBA", size).save(tmp_path / name)
    paths = [tmp_path / name for name in ("small.png", "large.png", "small.png")]
    small, large, again = decoded(2 * MIB, *paths)
    assert small.error is None and again.error is None
    assert large.error == (
        "2000x1000 pixels take 15 MiB to decode, and the limit is 2 MiB; scale the image down, or allow more memory"
    )


def test_a_jpeg_over_the_limit_is_decoded_at_a_fraction_of_its_size(tmp_path: Path) -> None:
    draw_image(0, 2400, 2100).save(tmp_path / "a.jpg")
    with PictureMemory(21 * MIB):
        whole = load_image(tmp_path / "a.jpg")
    with PictureMemory(10 * MIB):
        half = load_image(tmp_path / "a.jpg")
    with PictureMemory(4 * MIB), pytest.raises(FrameError, match=r"^2400x2100 pixels take 19 MiB"):
        load_image(tmp_path / "a.jpg")  # a quarter has fewer pixels than a large model looks at
    assert (whole.size, half.size) == ((2400, 2100), (1200, 1050))
    assert whole.tobytes() == load_image(tmp_path / "a.jpg").tobytes()
    difference = np.abs(np.asarray(whole.resize(half.size, Image.Resampling.BOX), int) - np.asarray(half))
    assert difference.mean() < 1


def test_a_jpeg_2000_over_the_limit_is_decoded_at_a_fraction_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remtta.streams.images.MIN_REDUCED_SIDE", 100)
    draw_image(0, 240, 210).save(tmp_path / "a.jp2")
    with PictureMemory(600_000):
        assert load_image(tmp_path / "a.jp2").size == (120, 105)


def test_a_line_of_pixels_is_refused_before_it_is_resized_to_millions(tmp_path: Path) -> None:
    Image.new("RGB", (100_000, 1)).save(tmp_path / "line.png")  # 32 pixels high, it would be 3,200,000 wide
    [line] = decoded(100 * MIB, tmp_path / "line.png")
    assert line.error == "100000x1 pixels take 403 MiB to resize; cut the strip into pieces"


def test_resizing_a_square_takes_next_to_nothing() -> None:
    assert Preprocessing(*PREPROCESSING).resized_bytes(500, 500) == 4 * 32 * (32 + 500)
    squashed = Preprocessing(*PREPROCESSING[:-1], "squash")
    assert squashed.resized_bytes(10**6, 1) == 0


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "I", "F"])
def test_conversion_by_bands_gives_the_same_pixels(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    dtype = {"I;16": np.uint16, "I": np.int32, "F": np.float32}.get(mode)
    if dtype:
        image = Image.fromarray(rng.integers(0, 60_000, (33, 21)).astype(dtype))
    else:
        image = draw_image(0, 21, 33).convert(mode)
        if mode == "P":
            image.info["transparency"] = 3
        else:
            image.putalpha(draw_image(1, 21, 33).convert("L"))
    path = tmp_path / "a.tiff" if dtype else tmp_path / "a.png"
    image.save(path)
    at_once = load_image(path)
    monkeypatch.setattr("remtta.streams.images.BAND_PIXELS", 50)
    assert load_image(path).tobytes() == at_once.tobytes()
