"""Which plugin opens a file, and limits on the cost of a file."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, _imaging

from remtta.errors import FrameError, UsageError
from remtta.streams import pillow
from remtta.streams.images import image_suffixes, load_image
from remtta.streams.listing import list_files
from remtta.streams.pillow import load_plugins
from remtta.streams.sources import open_stream
from tests.command import remtta_here
from tests.conftest import TINY_OPTIONS, draw_image

SUFFIXES = "tga ico png pcx jpg bmp gif tif webp ppm sgi jp2 dds qoi icns"

OPEN_ALL = """
import hashlib, json, sys
from pathlib import Path
from remtta.errors import FrameError
from remtta.streams.images import load_image
answers = {}
for path in sys.argv[1:]:
    try:
        image = load_image(Path(path))
        answers[path] = [*image.size, hashlib.sha256(image.tobytes()).hexdigest()]
    except FrameError as error:
        answers[path] = str(error)
print(json.dumps(answers, sort_keys=True))
"""


def draw_formats(folder: Path) -> list[Path]:
    """Write files in many formats, including some that several plugins would open."""
    image = draw_image(0, 32, 32)
    names = [f"a.{suffix}" for suffix in SUFFIXES.split(" ")]
    for name in names:
        image.save(folder / name)
    icon = draw_image(0, 128, 128).convert("RGBA")  # by the size of its pixels it resembles a TGA, without a signature
    icon.save(folder / "large.ico", sizes=[(128, 128)], bitmap_format="bmp")
    (folder / "zeros.ico").write_bytes(b"\0\0\1\0\1\0\x10\x10" + bytes(500))
    (folder / "odd.ico").write_bytes((folder / "a.ico").read_bytes()[:40] + bytes(3000))
    (folder / "cut.cur").write_bytes(b"\0\0\2\0\1\0\x20\x20\0\0\1\0\x18\0" + bytes(3000))
    return [folder / name for name in (*names, "large.ico", "zeros.ico", "odd.ico", "cut.cur")]


def test_how_a_file_is_opened_does_not_depend_on_earlier_files(tmp_path: Path) -> None:
    paths = [str(path) for path in draw_formats(tmp_path)]
    orders = [paths, paths[::-1]]
    answers = {
        subprocess.run([sys.executable, "-c", OPEN_ALL, *order], capture_output=True, check=True).stdout
        for order in orders
    }
    assert len(answers) == 1


def test_freed_pixels_leave_the_process() -> None:
    load_plugins()
    assert _imaging.get_block_size() > 32 * 2**20  # what glibc keeps, in each thread


def test_an_mpo_is_a_frame_of_a_folder(tmp_path: Path) -> None:
    draw_image(0).save(tmp_path / "a.mpo", save_all=True, append_images=[draw_image(1)])
    [frame] = open_stream(tmp_path).frames
    assert frame.load().size == (40, 36)


def endless_header(path: Path) -> None:
    draw_image(0).save(path)
    header = path.read_bytes()[:20]  # SOI and JFIF
    with path.open("wb") as file:
        file.write(header)
        file.truncate(2 * 2**30)  # zeros that take no room


def endless_scans(path: Path) -> None:
    draw_image(0).save(path, progressive=True)
    assert load_image(path).size == (40, 36)
    data = path.read_bytes()
    last = data.rindex(b"\xff\xda")
    path.write_bytes(data[:last] + data[last:-2] * 5000 + data[-2:])


@pytest.mark.parametrize(
    ("write", "limit", "value", "message"),
    [
        (endless_header, "MAX_READS", 20_000, "^too much of it has to be read for the image in it"),
        (endless_scans, "MAX_SCANNED_PIXELS", 1_000_000, "^too much of it has to be read"),  # 694 scans of 40 x 36
        (lambda path: draw_image(0, 300, 300).save(path), "MAX_SECONDS", -1.0, "s to decode$"),
    ],
    ids=["header", "scans", "seconds"],
)
def test_a_file_that_costs_too_much_is_given_up(
    write: Callable[[Path], None],
    limit: str,
    value: float,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "a.jpg")
    monkeypatch.setattr(pillow, limit, value)
    with pytest.raises(FrameError, match=message):
        load_image(tmp_path / "a.jpg")


def test_a_program_for_ghostscript_and_a_compressed_fits_file_are_not_decoded(tmp_path: Path) -> None:
    (program := tmp_path / "a.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    with pytest.raises(FrameError, match=r"^not an image that Pillow can read$"):
        load_image(program)
    assert not {".eps", ".iim"} & image_suffixes()
    primary = "SIMPLE  = T|BITPIX  = 8|NAXIS   = 0|END"
    table = "XTENSION= 'BINTABLE'|BITPIX  = 8|NAXIS   = 2|NAXIS1  = 0|NAXIS2  = 0|ZIMAGE  = T|ZCMPTYPE= 'GZIP_1  '"
    table += "|ZBITPIX = 32|ZNAXIS  = 2|ZNAXIS1 = 9000|ZNAXIS2 = 9000|END"
    headers = ["".join(card.ljust(80) for card in header.split("|")).ljust(2880) for header in (primary, table)]
    (tmp_path / "a.fits").write_text("".join(headers).ljust(9000))
    with pytest.raises(FrameError, match=r"^a compressed FITS file"):
        load_image(tmp_path / "a.fits")


def test_libtiff_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.tif"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, compression="tiff_lzw")
    data = bytearray(path.read_bytes())
    data[200:4000] = bytes(3800)
    path.write_bytes(data)
    with pytest.raises(FrameError):
        load_image(path)
    assert capfd.readouterr().err == ""


def test_ignored_files_of_a_folder_are_reported_and_recorded(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.heic", "b.HEIC", "notes.txt", "._frame_1.png", ".hidden/x.png", "README"):
        (frames / name).parent.mkdir(exist_ok=True)
        (frames / name).touch()
    assert remtta_here("adapt", frames, *TINY_OPTIONS, "--checkpoint", checkpoint, "-o", tmp_path / "run") == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    left_out = {".heic": 2, ".txt": 1, "hidden": 2, "no ending": 1}
    assert record["source"]["num_frames"] == 12
    assert record["source"]["left_out"] == left_out
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ignored files")]
    assert line.startswith(f"ignored files in {frames}: 2 ")
    assert set(line.split(": ")[1].split(", ")) == {f"{count} {what}" for what, count in left_out.items()}


def test_a_folder_that_cannot_be_read_is_counted_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(path: str) -> Any:
        if str(path).endswith("locked"):  # the tests may run as root, who may read everything
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    scandir, left_out = os.scandir, Counter[str]()
    monkeypatch.setattr(os, "scandir", scan)
    (tmp_path / "locked").mkdir()
    assert list_files(tmp_path, {".png"}, "name", left_out) == [] and left_out == {"unreadable folder": 1}
    with pytest.raises(UsageError, match="locked cannot be read: Permission denied"):
        list_files(tmp_path / "locked", {".png"}, "name")
