import os
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from remtta.errors import FrameError
from remtta.options.run_options import Sort
from remtta.streams import pillow
from remtta.streams.decoding_memory import PictureMemory
from remtta.streams.images import image_suffixes, load_image, to_rgb
from remtta.streams.listing import list_files, natural_key, sort_files
from tests.conftest import draw_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
COLOURS = [RED, GREEN, BLUE]


def row(colours: list[Any], mode: str) -> Image.Image:
    """Return an image one pixel high."""
    image = Image.new(mode, (len(colours), 1))
    image.putdata(colours)
    return image


def greys(values: list[float], dtype: type[np.generic]) -> Image.Image:
    return Image.fromarray(np.array([values], dtype=dtype))


def pixels(path: Path) -> list[tuple[int, ...]]:
    image = load_image(path)
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


Tags = dict[int, Any]  # of a TIFF


def tiff(*pages: tuple[Tags, bytes], order: str = "<", bands: int = 1) -> bytes:
    """Return a TIFF of pages one pixel high, each with some of its tags and the pixels of as many separate bands."""
    content = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    for number, (given, data) in enumerate(pages, 1):
        size = len(data) // bands
        tags = {257: 1, 259: 1, 273: [0] * bands, 277: 1, 278: 1, 279: [size] * bands} | given
        lists = len(content) + 6 + 12 * len(tags)
        start = lists + sum(4 * len(value) for value in tags.values() if isinstance(value, list) and len(value) > 1)
        tags[273] = [start + band * size for band in range(bands)]
        entries, extra = b"", b""
        for tag, value in sorted(tags.items()):
            values = value if isinstance(value, list) else [value]
            packed = struct.pack(f"{order}{len(values)}I", *values)
            if len(values) > 1:
                extra, packed = extra + packed, struct.pack(f"{order}I", lists + len(extra))
            entries += struct.pack(f"{order}HHI", tag, 4, len(values)) + packed
        after = start + len(data) if number < len(pages) else 0
        content += struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", after) + extra + data
    return content


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tiff", ".ppm", ".tga", ".gif", ".webp"])
def test_lossless_colours_come_back_exactly(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    row(COLOURS, "RGB").save(path, lossless=True)
    assert pixels(path) == COLOURS


def test_sixteen_bit_colour_keeps_its_high_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    blue_green_red = np.array([[[0x0000, 0x8000, 0xFFFF]]], dtype=np.uint16)
    assert cv2.imwrite(str(path), blue_green_red)
    assert pixels(path) == [(255, 128, 0)]


def palette(*colours: tuple[int, ...]) -> Image.Image:
    image = Image.new("P", (len(colours), 1))
    image.putpalette([value for colour in colours for value in colour])
    image.putdata(list(range(len(colours))))
    return image


GREYS: list[tuple[type[np.generic], list[float], list[int]]] = [
    (np.uint16, [0, 257, 100 * 257, 65535], [0, 1, 100, 255]),
    (np.int32, [0, 100, 255], [0, 100, 255]),
    (np.int32, [0, 200, 65535], [0, 1, 255]),  # dark stays dark
    (np.int32, [0, 200_000, 1_000_000], [0, 51, 255]),
    (np.int32, [-7, -2, 0], [0, 0, 0]),
    (np.float32, [0.0, 0.2, 1.0], [0, 51, 255]),
    (np.float32, [0.0, 100.0, 255.0], [0, 100, 255]),
    (np.float32, [0.0, 200_000.0, 1_000_000.0], [0, 51, 255]),
    (np.float32, [-1.0, 0.4, 1.0], [0, 102, 255]),
    (np.float32, [0.0, float("nan"), 1.0], [0, 0, 255]),
]
LOSSLESS = {"lossless": True}  # of WebP
MODES: list[tuple[str, str, Image.Image, dict[str, Any], list[Any]]] = [
    ("P", ".png", palette(*COLOURS), {}, COLOURS),
    ("P", ".png", palette(*COLOURS), {"transparency": 1}, [RED, WHITE, BLUE]),
    # A fifth of red on white: green and blue are 255 * 4 / 5.
    ("P", ".png", palette(RED, BLUE), {"transparency": bytes([51, 255])}, [(255, 204, 204), BLUE]),
    ("RGB", ".png", row([RED, GREEN], "RGB"), {"transparency": RED}, [WHITE, GREEN]),
    ("L", ".png", row([10, 200], "L"), {"transparency": 10}, [255, 200]),
    ("L", ".png", row([0, 77, 255], "L"), {}, [0, 77, 255]),
    ("LA", ".png", row([(40, 255), (40, 0), (0, 51)], "LA"), {}, [40, 255, 204]),
    *(
        ("RGBA", suffix, row([(*BLUE, 255), (*BLUE, 0), (*BLUE, 51)], "RGBA"), LOSSLESS, [BLUE, WHITE, (204, 204, 255)])
        for suffix in (".png", ".tiff", ".webp")
    ),
    ("1", ".png", row([0, 255, 0], "1"), {}, [0, 255, 0]),
    ("CMYK", ".tiff", row([(10, 20, 30, 0), (0, 0, 0, 255)], "CMYK"), {}, [(245, 235, 225), (0, 0, 0)]),
    ("YCbCr", ".tiff", row([(0, 128, 128), (100, 128, 128)], "YCbCr"), {}, [0, 100]),
    *(
        ({np.uint16: "I;16", np.int32: "I", np.float32: "F"}[dtype], ".tiff", greys(values, dtype), {}, expected)
        for dtype, values, expected in GREYS
    ),
]


@pytest.mark.parametrize(("mode", "suffix", "image", "options", "expected"), MODES)
def test_every_mode_becomes_rgb_on_white(
    mode: str, suffix: str, image: Image.Image, options: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    image.save(path, **options)
    with Image.open(path) as stored:
        assert stored.mode == mode
    assert pixels(path) == [level if isinstance(level, tuple) else (level,) * 3 for level in expected]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [("CMYK", (255, 0, 0, 0), (0, 255, 255)), ("RGB", (200, 30, 90), (200, 30, 90))],  # the one is not inverted
)
def test_a_jpeg_keeps_its_colour(tmp_path: Path, mode: str, colour: Any, expected: Any) -> None:
    Image.new(mode, (16, 16), colour).save(tmp_path / "a.jpg", quality=95)
    assert np.abs(np.array(pixels(tmp_path / "a.jpg")) - expected).max() <= 3


@pytest.mark.parametrize("mode", ["PA", "La", "RGBa", "RGBX", "LAB", "HSV", "I;16B", "I;16L"])
def test_rare_modes_become_rgb(mode: str) -> None:
    converted = to_rgb(Image.new(mode, (3, 2)))
    assert (converted.mode, converted.size) == ("RGB", (3, 2))


@pytest.mark.parametrize(
    ("orientation", "expected"),
    # Stored is [[1, 2], [3, 4]]. EXIF says on which side its first row and first column are to be seen.
    [
        (1, [1, 2, 3, 4]),  # top, left
        (2, [2, 1, 4, 3]),  # top, right
        (3, [4, 3, 2, 1]),  # bottom, right
        (4, [3, 4, 1, 2]),  # bottom, left
        (5, [1, 3, 2, 4]),  # left, top
        (6, [3, 1, 4, 2]),  # right, top
        (7, [4, 2, 3, 1]),  # right, bottom
        (8, [2, 4, 1, 3]),  # left, bottom
    ],
)
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, expected: list[int]) -> None:
    path = tmp_path / "a.png"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.array([[1, 2], [3, 4]], dtype=np.uint8)).save(path, exif=exif)
    assert pixels(path) == [(level,) * 3 for level in expected]


def test_the_orientation_in_a_png_xmp_is_applied(tmp_path: Path) -> None:
    (metadata := PngInfo()).add_itxt("XML:com.adobe.xmp", 'tiff:Orientation="3"')
    row([RED, BLUE], "RGB").save(tmp_path / "a.png", pnginfo=metadata)
    assert pixels(tmp_path / "a.png") == [BLUE, RED]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_broken_exif_does_not_hide_the_image(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    draw_image(0, width=40, height=20).save(path, exif=b"Exif\0\0this is no TIFF header")
    assert load_image(path).size == (40, 20)


@pytest.mark.parametrize(
    ("order", "bits", "sample_format", "photometric", "values", "expected"),
    [
        ("<", 12, 1, 1, b"\xff\xf8\x00", [255, 128]),  # 4095 and 2048
        (">", 12, 1, 0, b"\xff\xf8\x00", [0, 127]),
        (">", 16, 1, 1, np.array([0, 155 * 257]), [0, 155]),
        (">", 16, 1, 0, np.array([0, 155 * 257]), [255, 100]),
        (">", 32, 1, 0, np.array([0, 2**31, 2**32 - 1]), [255, 127, 0]),
        ("<", 16, 1, 0, np.array([0, 155 * 257]), [255, 100]),  # zero is white
        ("<", 32, 3, 0, np.array([0.0, 1.0]), [255, 0]),
        (">", 32, 3, 1, np.array([0.2, 1.0]), [51, 255]),
        (">", 32, 2, 1, np.array([100, 255]), [100, 255]),
        (">", 16, 2, 1, np.array([100, 255]), [100, 255]),
        ("<", 16, 2, 1, np.array([-5, 2**14, 2**15 - 1]), [0, 128, 255]),
        ("<", 32, 1, 1, np.array([0, 2**31, 2**32 - 1]), [0, 128, 255]),
    ],
)
@pytest.mark.parametrize("compression", [1, 8])  # none, and deflate
def test_every_sample_format_of_a_tiff_is_read(
    order: str,
    bits: int,
    sample_format: int,
    photometric: int,
    values: Any,
    expected: list[int],
    compression: int,
    tmp_path: Path,
) -> None:
    kind = "_uif"[sample_format]
    data = values if isinstance(values, bytes) else values.astype(f"{order}{kind}{bits // 8}").tobytes()
    data = zlib.compress(data) if compression == 8 else data
    page: Tags = {256: len(expected), 258: bits, 259: compression, 262: photometric, 339: sample_format}
    (tmp_path / "a.tif").write_bytes(tiff((page, data), order=order))
    assert pixels(tmp_path / "a.tif") == [(level,) * 3 for level in expected]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [1, 257])  # levels of 8 bits, against the standard, and of 16
def test_the_colour_map_of_a_tiff_may_have_8_bits(order: str, bits: int, step: int, tmp_path: Path) -> None:
    colours = [(10, 200, 90), (255, 0, 31)]
    bands = [band + (0,) * (2**bits - 2) for band in zip(*colours, strict=True)]
    page: Tags = {256: 2, 258: bits, 262: 3, 320: [step * level for band in bands for level in band]}
    data = {1: b"\x40", 2: b"\x10", 4: b"\x01", 8: b"\0\1"}[bits]
    (tmp_path / "a.tif").write_bytes(tiff((page, data), order=order))
    assert pixels(tmp_path / "a.tif") == colours


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [1, 8])
def test_separate_bands_of_16_bits_are_read(order: str, compression: int, tmp_path: Path) -> None:
    bands = [np.array([level * 257, 65535], f"{order}u2").tobytes() for level in (10, 200, 90)]
    bands = [zlib.compress(band, 0) for band in bands] if compression == 8 else bands  # all as long
    page: Tags = {256: 2, 258: [16] * 3, 259: compression, 262: 2, 277: 3, 284: 2}
    (tmp_path / "a.tif").write_bytes(tiff((page, b"".join(bands)), order=order, bands=3))
    assert pixels(tmp_path / "a.tif") == [(10, 200, 90), WHITE]


def test_premultiplied_greys_are_read(tmp_path: Path) -> None:
    page: Tags = {256: 3, 258: [8, 8], 262: 1, 277: 2, 338: [1]}
    (tmp_path / "a.tif").write_bytes(tiff((page, bytes([40, 255, 40, 51, 0, 0]))))
    assert pixels(tmp_path / "a.tif") == [(level,) * 3 for level in (40, 244, 255)]  # 40 / 51 by a fifth, on white


THUMBNAIL, PICTURE = ({256: 1, 258: 8, 262: 1}, b"\7"), ({256: 3, 258: 8, 262: 1}, bytes([1, 2, 3]))


@pytest.mark.parametrize("mark", [{254: 1}, {254: 4}, {254: 5}, {255: 2}])
@pytest.mark.parametrize("all_marked", [False, True])  # then the largest is the picture
def test_the_thumbnail_of_a_tiff_is_not_its_picture(mark: dict[int, int], all_marked: bool, tmp_path: Path) -> None:
    thumbnail, picture = (THUMBNAIL[0] | mark, THUMBNAIL[1]), (PICTURE[0] | (mark if all_marked else {}), PICTURE[1])
    (tmp_path / "a.tif").write_bytes(tiff(thumbnail, picture, thumbnail))
    assert pixels(tmp_path / "a.tif") == [(level,) * 3 for level in (1, 2, 3)]


def test_a_raw_file_is_refused_instead_of_its_thumbnail(tmp_path: Path) -> None:
    tags, data = THUMBNAIL
    (tmp_path / "a.dng").write_bytes(tiff(({**tags, 254: 1, 330: 4711}, data), PICTURE))
    with pytest.raises(FrameError, match=r"^a raw file of a camera"):
        load_image(tmp_path / "a.dng")


@pytest.mark.parametrize(
    ("bits", "kind", "data", "transparent", "expected"),
    [
        (2, 0, b"\x1b", [1], [0, 255, 170, 255]),
        (4, 0, b"\x05\xaf", [5], [0, 255, 170, 255]),
        (8, 0, bytes([0, 5, 170]), [5], [0, 255, 170]),
        (16, 0, struct.pack(">3H", 0, 1000, 257 * 170), [1000], [0, 255, 170]),
        (16, 0, struct.pack(">2H", 257 * 9, 257 * 9), [257 * 9], [9, 9]),  # all are: unused
        (16, 2, struct.pack(">6H", 1000, 2000, 3000, 257 * 9, 257 * 9, 257 * 9), [1000, 2000, 3000], [255, 9]),
    ],
)
def test_a_transparent_colour_of_a_png_of_any_depth_becomes_white(
    bits: int, kind: int, data: bytes, transparent: list[int], expected: list[int], tmp_path: Path
) -> None:
    header = struct.pack(">IIBBBBB", len(expected), 1, bits, kind, 0, 0, 0)
    chunks = {b"IHDR": header, b"tRNS": struct.pack(f">{len(transparent)}H", *transparent)}
    chunks |= {b"IDAT": zlib.compress(b"\0" + data), b"IEND": b""}
    content = b"\x89PNG\r\n\x1a\n"
    for name, value in chunks.items():
        content += struct.pack(">I", len(value)) + name + value + struct.pack(">I", zlib.crc32(name + value))
    (tmp_path / "a.png").write_bytes(content)
    assert pixels(tmp_path / "a.png") == [(level,) * 3 for level in expected]


def jpeg2000(samples: np.ndarray, bits: int) -> bytes:
    """Return samples (H, W, C) of some bits losslessly, in the colours' order BGR."""
    # OpenCV writes 16 bits. Fewer in the header move all samples down by half the difference of the ranges.
    samples = samples + np.uint16(2**15 - 2 ** (bits - 1))
    written, data = cv2.imencode(".jp2", samples, [cv2.IMWRITE_JPEG2000_COMPRESSION_X1000, 1000])
    assert written
    content = bytearray(data.tobytes())
    start = content.index(b"\xff\x4f\xff\x51")
    for position in (content.index(b"ihdr") + 14, *range(start + 42, start + 42 + 3 * samples.shape[2], 3)):
        content[position] = bits - 1
    return bytes(content)


@pytest.mark.parametrize("bits", [9, 12, 16])
@pytest.mark.parametrize("bands", [3, 4])
def test_white_stays_white_in_a_jpeg_2000_of_more_than_8_bits(bits: int, bands: int, tmp_path: Path) -> None:
    top = 2**bits - 1
    samples = np.random.default_rng(0).integers(0, top, (64, 64, bands), np.uint16)
    samples[:20], samples[20:40] = top, 0
    samples[..., 3:] = top  # opaque
    (tmp_path / "a.jp2").write_bytes(jpeg2000(samples, bits))
    decoded = np.asarray(load_image(tmp_path / "a.jp2"))
    assert np.abs(decoded - samples[..., 2::-1] * (255 / top)).max() <= 0.51


def test_a_jpeg_2000_of_more_than_8_bits_is_not_larger_than_it_says(tmp_path: Path) -> None:
    content = jpeg2000(np.zeros((64, 64, 3), np.uint16), 16)
    (tmp_path / "a.jp2").write_bytes(
        content.replace(b"ihdr" + struct.pack(">II", 64, 64), b"ihdr" + bytes([0, 0, 0, 8] * 2))
    )
    with pytest.raises(FrameError, match=r"^cannot be decoded: "):
        load_image(tmp_path / "a.jp2")


def test_a_jpeg_2000_of_more_than_8_bits_takes_more_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jp2").write_bytes(jpeg2000(np.zeros((64, 64, 3), np.uint16), 16))
    with PictureMemory(64 * 64 * 56):
        assert load_image(tmp_path / "a.jp2").size == (64, 64)
    with PictureMemory(64 * 64 * 55), pytest.raises(FrameError, match=r"^64x64 pixels take "):
        load_image(tmp_path / "a.jp2")


@pytest.mark.parametrize("suffix", [".png", ".tga", ".tiff", ".webp", ".bmp"])
def test_alpha_that_is_zero_everywhere_is_ignored(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    image = row([(200, 100, 50, 0), (*BLUE, 0)], "RGBA")
    if suffix == ".bmp":  # with a mask for alpha, which Pillow reads but does not write
        masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
        header = struct.pack("<IiiHHIIiiII", 108, 2, 1, 1, 32, 3, 8, 0, 0, 0, 0) + masks + b"BGRs" + bytes(48)
        path.write_bytes(b"BM" + struct.pack("<IHHI", 130, 0, 0, 122) + header + image.tobytes("raw", "BGRA"))
    else:
        image.save(path, lossless=True, exact=True)
    with Image.open(path) as stored:
        assert stored.mode == "RGBA"
    assert pixels(path) == [(200, 100, 50), BLUE]


@pytest.mark.parametrize("position", [33, -12])  # before the pixels and after them
@pytest.mark.parametrize("chunk", [b"tEXt", b"zTXt", b"iTXt", b"iCCP"])
def test_a_png_is_read_whatever_the_size_of_its_metadata(chunk: bytes, position: int, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    row(COLOURS, "RGB").save(path)
    text = bytes(70_000_000) if chunk == b"tEXt" else zlib.compress(bytes(2_000_000))
    data = b"k\0" + {b"tEXt": b"", b"iTXt": b"\1\0\0\0"}.get(chunk, b"\0") + text
    whole = struct.pack(">I", len(data)) + chunk + data + struct.pack(">I", zlib.crc32(chunk + data))
    png = path.read_bytes()
    path.write_bytes(png[:position] + whole + png[position:])
    assert pixels(path) == COLOURS


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".gif", ".tiff", ".webp"])
@pytest.mark.parametrize("kept", [0.1, 0.9])
def test_a_truncated_image_is_a_frame_error(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"a{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(FrameError):
        load_image(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.jpg", "^not an image that Pillow can read$"),
        ("empty.png", "^not an image that Pillow can read$"),
        ("missing.png", "^no such file$"),
        ("", "^a folder; name the images in it$"),
        ("x" * 5000, "^cannot be decoded: "),
        ("a\0b.png", "^cannot be decoded: "),
    ],
)
def test_a_path_without_an_image_is_a_frame_error(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.jpg").write_text("not a picture\n" * 100)
    (tmp_path / "empty.png").touch()
    with pytest.raises(FrameError, match=message):
        load_image(tmp_path / name)


def test_images_over_the_limit_are_refused_with_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pillow, "MAX_PIXELS", 12)
    for name, size in (("fits", (4, 3)), ("over", (13, 1))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    assert load_image(tmp_path / "fits.png").size == (4, 3)
    with pytest.raises(FrameError, match=r"^13x1 pixels is over the limit of 12 "):
        load_image(tmp_path / "over.png")


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".tiff"])
def test_the_first_of_several_pictures_is_taken(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    first, *others = (Image.new("RGB", (4, 4), colour) for colour in COLOURS)
    first.save(path, save_all=True, append_images=others, lossless=True)
    with Image.open(path) as image:
        assert getattr(image, "n_frames", 1) == 3
    assert set(pixels(path)) == {RED}


def test_documents_and_videos_are_not_stills() -> None:
    suffixes = image_suffixes()
    assert suffixes >= {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
    assert not suffixes & {".pdf", ".eps", ".mpg", ".mp4", ".txt", ""}


@pytest.mark.parametrize(
    "ordered",
    [
        ["frame_1.png", "frame_2.png", "frame_10.png"],
        ["1.png", "2.png", "03.png", "10.png"],
        ["A1.png", "a2.png", "A3.png", "b1.png", "B2.png"],
        ["a/z.png", "a.png"],
        ["day2/cam1/5.png", "day2/cam10/1.png", "day10/cam1/1.png"],
        ["1.png", "1_2.png", "1_10.png"],
        # Digits of other scripts are text.
        ["5\u0663.png", "a5.png", "b/1.png", "\u00b2.png", "\u0663/1.png", "\u06635.png", "\uff11\uff12.png"],
    ],
)
def test_names_sort_in_natural_order(ordered: list[str]) -> None:
    natural = [name.replace("/", os.sep) for name in ordered]
    backwards = natural[::-1]
    assert sorted(backwards, key=natural_key) == natural


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _listed(folder: Path, sort: Sort = "name") -> list[str]:
    return [path.relative_to(folder).as_posix() for path in list_files(folder, image_suffixes(), sort)]


def test_folders_are_listed_recursively_in_natural_order(tmp_path: Path) -> None:
    _touch(tmp_path, "b/frame_10.png", "b/frame_2.JPG", "a/x.Png", "c.png", "b/deep/er/1.bmp", "notes.txt", "b/README")
    assert _listed(tmp_path) == ["a/x.Png", "b/deep/er/1.bmp", "b/frame_2.JPG", "b/frame_10.png", "c.png"]


def test_files_sort_by_the_time_they_were_modified(tmp_path: Path) -> None:
    _touch(tmp_path, "a.png", "b.png", "c/d.png", "frame_10.png", "frame_2.png")
    for seconds, name in enumerate(["c/d.png", "b.png", "a.png"]):
        os.utime(tmp_path / name, (0, seconds))
    for name in ("frame_10.png", "frame_2.png"):  # equally old: natural order decides
        os.utime(tmp_path / name, (0, 9))
    assert _listed(tmp_path, "mtime") == ["c/d.png", "b.png", "a.png", "frame_2.png", "frame_10.png"]
    found = [Path("b10"), Path("b9"), Path("a")]
    assert sort_files(iter(found), "none") == found
