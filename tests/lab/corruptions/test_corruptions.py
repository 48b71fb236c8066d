import colorsys
import functools
import io
import math
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from remtta.errors import UsageError
from remtta.lab.corruptions import blur, corrupt, digital, function_of, weather
from remtta.lab.corruptions.options import CorruptOptions, parse_corruptions
from remtta.lab.corruptions.parameters import (
    CORRUPTIONS,
    HOLD_OUTS,
    PARAMETERS,
    SEVERITIES,
    STANDARD,
    ParameterSet,
    parameter_set_of,
)
from tests.conftest import draw_image

# Where the published parameters themselves make a severity milder than the one before, or leave it as it was; or
# lengths do that are rounded to pixels (glass_blur at 96).
NOT_MONOTONE: dict[ParameterSet, set[str]] = {
    "imagenet": {"elastic_transform", "saturate", "frost", "fog", "glass_blur"},
    "cifar": {"elastic_transform", "saturate", "frost", "glass_blur", "spatter", "motion_blur"},
}
GREY = np.full((60, 80, 3), 0.5, dtype=np.float32)
ODD_SIZES = [(1, 1), (7, 300), (300, 7), (2, 65), (90, 70)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@functools.cache
def picture(size: int, seed: int = 0) -> Image.Image:
    """Something like a photograph: amplitudes that fall with the frequency, the channels alike."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)).clip(1 / size)
    noise = 0.5 * rng(seed).standard_normal((3, size, size)) + rng(seed + 1).standard_normal((size, size))
    layers = np.fft.ifft2(np.fft.fft2(noise) / frequency**1.2).real
    layers *= 50 / layers.std()
    return Image.fromarray((layers.transpose(1, 2, 0) + 110).clip(0, 255).astype(np.uint8))


def psnr(one: Image.Image, other: Image.Image) -> float:
    error = np.mean((np.asarray(one, dtype=float) - np.asarray(other)) ** 2)
    return 99.0 if error == 0 else 10 * math.log10(255**2 / float(error))


@pytest.mark.parametrize(
    ("name", "severity", "parameter_set", "published"),
    [
        ("gaussian_noise", 1, "imagenet", (0.08,)),
        ("shot_noise", 4, "cifar", (75,)),
        ("impulse_noise", 2, "imagenet", (0.06,)),
        ("defocus_blur", 5, "cifar", (1.5, 0.1)),
        ("glass_blur", 3, "imagenet", (1, 2, 3)),
        ("motion_blur", 1, "cifar", (6, 1)),
        ("zoom_blur", 4, "imagenet", (1.26, 0.02)),
        ("snow", 2, "cifar", (0.1, 0.2, 1, 0.5, 10, 4, 0.9)),
        ("frost", 5, "imagenet", (0.6, 0.75)),
        ("fog", 3, "cifar", (0.75, 2.5)),
        ("brightness", 1, "imagenet", (0.1,)),
        ("contrast", 4, "cifar", (0.3,)),
        ("elastic_transform", 2, "imagenet", (488, 19.52, 48.8)),
        ("pixelate", 5, "cifar", (0.65,)),
        ("jpeg_compression", 3, "imagenet", (15,)),
        ("speckle_noise", 1, "cifar", (0.06,)),
        ("spatter", 4, "imagenet", (0.65, 0.3, 1, 0.65, 1.5, 1)),
        ("gaussian_blur", 2, "cifar", (0.6,)),
        ("saturate", 5, "imagenet", (20, 0.2)),
    ],
)
def test_the_parameters_are_the_published_ones(
    name: str, severity: int, parameter_set: ParameterSet, published: tuple[float, ...]
) -> None:
    assert tuple(PARAMETERS[name].values(severity, parameter_set).values()) == published


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_size_keeps_its_size_and_the_same_seed_makes_the_same_image(name: str) -> None:
    for number, size in enumerate(ODD_SIZES):
        image = draw_image(number, *size)
        before = image.tobytes()
        corrupted = corrupt(image, name, 5, rng(number))
        assert (corrupted.size, corrupted.mode) == (size, "RGB")
        assert corrupted.tobytes() == corrupt(image, name, 5, rng(number)).tobytes()
        assert image.tobytes() == before


@pytest.mark.parametrize("parameter_set", ["imagenet", "cifar"])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_psnr_falls_with_severity(name: str, parameter_set: ParameterSet) -> None:
    size, count = (96, 2) if parameter_set == "imagenet" else (32, 6)
    images = [picture(size, seed) for seed in range(count)]
    means = [
        np.mean([psnr(image, corrupt(image, name, severity, rng(seed))) for seed, image in enumerate(images)])
        for severity in SEVERITIES
    ]
    assert min(means) > 5
    assert max(means) < 50
    if name not in NOT_MONOTONE[parameter_set]:
        assert all(milder > harder for milder, harder in pairwise(means)), means


def test_small_images_get_the_parameters_of_cifar() -> None:
    assert [parameter_set_of(side) for side in (1, 32, 64, 65, 224)] == ["cifar"] * 3 + ["imagenet"] * 2
    image = draw_image(0, 64, 80)
    assert corrupt(image, "contrast", 1, rng()) == corrupt(image, "contrast", 1, rng(), "cifar")
    assert corrupt(image, "contrast", 1, rng()) != corrupt(image, "contrast", 1, rng(), "imagenet")


def test_wrong_arguments_are_usage_errors() -> None:
    image = draw_image(0)
    with pytest.raises(ValueError, match='unknown corruption "rain"; choose gaussian_noise, shot_noise'):
        corrupt(image, "rain", 1, rng())
    with pytest.raises(ValueError, match="severity must be 1 to 5, got 6"):
        corrupt(image, "fog", 6, rng())
    with pytest.raises(ValueError, match=r"image must be RGB .*, got L"):
        corrupt(image.convert("L"), "fog", 1, rng())
    with pytest.raises(ValueError, match="image must be at most 32766 pixels a side, got 32767x1"):
        corrupt(draw_image(0, 32_767, 1), "fog", 1, rng())


def test_what_is_written_back_is_clipped_and_rounded() -> None:
    values = np.array([[[-0.1, 0.4 / 255, 0.6 / 255], [0.5, 254.6 / 255, 1.3]]], dtype=np.float32)
    assert np.asarray(digital.to_image(values)).tolist() == [[[0, 0, 1], [128, 255, 255]]]
    every = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 256, 3)
    assert np.array_equal(np.asarray(digital.to_image(digital.to_float(Image.fromarray(every)))), every)


@pytest.mark.parametrize("level", [0.0, 0.25, 0.5])
def test_noise_has_its_deviation(level: float) -> None:
    even = np.full_like(GREY, level)
    # Speckles grow with the value. A Poisson count of mean and variance x c, divided by c: mean x, variance x / c.
    for noisy, deviation in (
        (digital.gaussian_noise(even, rng(), 1, std=0.26), 0.26),
        (digital.speckle_noise(even, rng(), 1, std=0.4), 0.4 * level),
        (digital.shot_noise(even, rng(), 1, photons=60), math.sqrt(level / 60)),
        (digital.shot_noise(even, rng(), 1, photons=5), math.sqrt(level / 5)),
    ):
        assert noisy.std() == pytest.approx(deviation, rel=0.03)
        assert noisy.mean() == pytest.approx(level, abs=0.01)
    shot = 60 * digital.shot_noise(even, rng(), 1, photons=60)
    assert np.allclose(shot, np.rint(shot), atol=1e-4)


def test_impulse_noise_is_half_salt_and_half_pepper() -> None:
    noisy = digital.impulse_noise(np.full((200, 200, 3), 0.5, dtype=np.float32), rng(), 1, share=0.27)
    assert (noisy == 1).mean() == pytest.approx(0.135, rel=0.04)
    assert (noisy == 0).mean() == pytest.approx(0.135, rel=0.04)
    assert np.isin(noisy, (0, 0.5, 1)).all()


@pytest.mark.parametrize(("radius", "sigma", "edge"), [(3, 0.1, 1), (10, 0.5, 2), (0.3, 0.4, 1), (45, 2.3, 10)])
def test_the_disk_sums_to_1_and_is_round(radius: float, sigma: float, edge: int) -> None:
    kernel = blur.disk(radius, sigma, edge)
    assert kernel.sum() == pytest.approx(1, abs=1e-5)
    assert np.allclose(kernel, kernel.T)
    assert np.allclose(kernel, kernel[::-1])
    # The second moment of a disk along one axis is radius^2 / 4.
    steps = np.arange(len(kernel)) - len(kernel) // 2
    if radius >= 10:
        assert (kernel.sum(axis=0) * steps**2).sum() == pytest.approx(radius**2 / 4 + sigma**2, rel=0.05)


def test_blurs_leave_an_even_image_as_it_is() -> None:
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"):
        for scale in (0.5, 1, 3):
            values = PARAMETERS[name].values(5, "imagenet")
            assert np.allclose(function_of(name)(GREY, rng(), scale, **values), GREY, atol=1e-5)


def test_defocus_spreads_a_point_over_the_disk() -> None:
    point = np.zeros((31, 31, 3), dtype=np.float32)
    point[15, 15] = 1
    blurred = blur.defocus_blur(point, rng(), 1, radius=6, sigma=0.5)
    kernel = blur.disk(6, 0.5, 1)
    reach = len(kernel) // 2
    assert np.allclose(blurred[15 - reach : 16 + reach, 15 - reach : 16 + reach, 1], kernel, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 1, 2])
def test_lengths_grow_with_the_image(scale: float) -> None:
    line = np.zeros((9, 201, 3), dtype=np.float32)
    line[:, 100] = 1
    profile = function_of("gaussian_blur")(line, rng(), scale, sigma=4)[4, :, 0]
    assert math.sqrt(float((profile * (np.arange(201) - 100) ** 2).sum())) == pytest.approx(4 * scale, rel=0.02)


def test_a_wide_gaussian_is_the_same_by_fourier_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = rng().random((300, 320, 3), dtype=np.float32)
    wide = blur.gaussian_filter(noise, 12)
    monkeypatch.setattr("remtta.lab.corruptions.blur.WIDE_REACH", 1000)
    assert np.allclose(wide, blur.gaussian_filter(noise, 12), atol=1e-5)


def test_the_motion_kernel_is_one_side_of_a_gaussian_on_a_line() -> None:
    kernel = blur.motion_kernel(10, 3, 0)
    assert kernel.shape == (41, 41)
    assert kernel.sum() == pytest.approx(1)
    line = kernel[20, 20:]
    assert np.count_nonzero(kernel) == np.count_nonzero(line) == 21  # 2 radius + 1 taps, none to the left
    assert line[3] / line[0] == pytest.approx(math.exp(-0.5))
    down = blur.motion_kernel(12, 12, -90)
    assert np.count_nonzero(down[: len(down) // 2 + 1, len(down) // 2]) == np.count_nonzero(down) == 25


@pytest.mark.parametrize(("severity", "count"), [(1, 11), (2, 16), (3, 11), (4, 13), (5, 11)])
def test_zoom_blur_is_a_mean_over_the_steps_below_the_last_zoom(
    severity: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    zooms: list[float] = []

    def watched(image: np.ndarray, zoom: float) -> np.ndarray:
        zooms.append(zoom)
        return image

    monkeypatch.setattr("remtta.lab.corruptions.blur.zoomed", watched)
    values = PARAMETERS["zoom_blur"].values(severity, "imagenet")
    assert np.allclose(blur.zoom_blur(GREY, rng(), 1, **values), GREY)
    assert len(zooms) == count
    assert zooms[0] == 1
    assert max(zooms) < values["zoom"] - 1e-9


def test_a_zoom_keeps_the_centre_and_enlarges_around_it() -> None:
    ramp = np.tile(np.linspace(0, 1, 21, dtype=np.float32), (11, 1))
    enlarged = blur.zoomed(ramp, 2)
    assert enlarged[5, 10] == pytest.approx(0.5, abs=1e-3)
    assert enlarged[5, 20] == pytest.approx(0.75, abs=2e-2)  # 10 columns off the centre show what was 5 off


@pytest.mark.parametrize(("distance", "passes"), [(1, 2), (4, 2), (2, 3)])
def test_glass_blur_swaps_every_pixel_in_order_from_the_bottom_right(distance: int, passes: int) -> None:
    height, width = 7, 9
    expected = np.arange(height * width).reshape(height, width)
    draws = rng(3)
    for _ in range(passes):
        for row in range(height - 1, -1, -1):
            rows, columns = draws.integers(-distance, distance + 1, (2, width))
            for column in range(width - 1, -1, -1):
                other_row = min(max(row + rows[column], 0), height - 1)
                other_column = min(max(column + columns[column], 0), width - 1)
                here, there = expected[row, column], expected[other_row, other_column]
                expected[row, column], expected[other_row, other_column] = there, here
    assert np.array_equal(blur.shuffled_nearby(height, width, distance, passes, rng(3)), expected.ravel())


def test_glass_blur_of_a_large_image_is_the_same_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    image = digital.to_float(draw_image(0))
    expected = blur.glass_blur(image, rng(), 1, sigma=0.7, distance=1, passes=2)
    monkeypatch.setattr("remtta.lab.corruptions.blur.LIST_UP_TO", 10)
    assert np.array_equal(blur.glass_blur(image, rng(), 1, sigma=0.7, distance=1, passes=2), expected)


def test_plasma_spans_0_to_1_and_has_no_seam() -> None:
    cloud = weather.plasma(200, 1.4, rng())
    assert cloud.shape == (256, 256)
    assert (cloud.min(), cloud.max()) == (0, 1)
    steps = np.abs(np.diff(cloud, axis=1)).mean()
    assert np.abs(cloud[:, 0] - cloud[:, -1]).mean() < 1.5 * steps
    assert weather.plasma(1, 2, rng()).shape == (2, 2)


def test_fog_follows_its_formula() -> None:
    image = digital.to_float(picture(64))
    cloud = weather.plasma(64, 2, rng())[..., None]
    expected = (image + 1.5 * cloud) * image.max() / (image.max() + 1.5)
    assert np.allclose(weather.fog(image, rng(), 1, amount=1.5, decay=2), expected, atol=1e-6)
    assert weather.fog(np.zeros_like(image), rng(), 1, amount=1.5, decay=2).max() == 0


@pytest.mark.parametrize("number", [0, weather.NUM_TEXTURES - 1])
def test_the_ice_is_bluish_white_on_dark_without_a_seam(number: int) -> None:
    texture = weather.ice_texture(number, 224)
    assert texture.shape == (512, 512, 3)
    assert 0 <= texture.min() < 0.15
    assert 0.85 < texture.max() <= 1
    assert 0.3 < texture.mean() < 0.55
    assert texture[..., 2].mean() > texture[..., 0].mean()
    inside = np.abs(np.diff(texture, axis=0)).mean()
    assert np.abs(texture[0] - texture[-1]).mean() < 2 * inside
    assert weather.ice_texture(number, 224) is texture
    with pytest.raises(ValueError, match="read-only"):
        texture[0] = 0
    assert weather.ice_texture(number, 32).shape == (73, 73, 3)


def test_frost_is_a_weighted_sum_of_image_and_ice() -> None:
    black, white = np.zeros((50, 300, 3), dtype=np.float32), np.ones((50, 300, 3), dtype=np.float32)
    ice = weather.frost(black, rng(), 1, keep=0.6, ice=0.75)
    assert 0 < ice.min() < ice.max() <= 0.7501
    assert np.allclose(weather.frost(white, rng(), 1, keep=0.6, ice=0.75) - ice, 0.6, atol=1e-6)


def test_snow_whitens_and_falls_twice() -> None:
    dark = np.full((224, 224, 3), 0.2, dtype=np.float32)
    settings = PARAMETERS["snow"].values(3, "imagenet")
    snowy = weather.snow(dark, rng(), 1, **settings)
    # Without flakes: 0.7 * 0.2 + 0.3 * (1.5 * 0.2 + 0.5)
    flakes = snowy - 0.38
    assert flakes.min() == pytest.approx(0, abs=1e-5)
    assert np.allclose(flakes, flakes[::-1, ::-1], atol=1e-5)
    assert 0.02 < (flakes > 0.1).mean() < 0.5


def test_spatter_is_pale_turquoise_water_or_brown_mud() -> None:
    grey = np.full((224, 224, 3), 0.5, dtype=np.float32)
    water = weather.spatter(grey, rng(), 1, **PARAMETERS["spatter"].values(2, "imagenet")) - grey
    brightest = water.reshape(-1, 3)[water.sum(axis=2).argmax()]
    assert np.allclose(brightest, 0.6 * np.array([175, 238, 238]) / 255, atol=1e-3)
    assert water.min() == 0
    mud = weather.spatter(grey, rng(), 1, **PARAMETERS["spatter"].values(5, "imagenet"))
    darkest = mud.reshape(-1, 3)[mud.sum(axis=2).argmin()]
    assert np.allclose(darkest, np.array([63, 42, 20]) / 255, atol=0.03)
    assert 0.05 < (mud[..., 0] < 0.4).mean() < 0.5


def test_brightness_and_saturation_are_those_of_hsv() -> None:
    image = rng().random((6, 7, 3), dtype=np.float32)
    image[0, 0] = 0
    image[0, 1] = 0.4
    brighter = digital.brightness(image, rng(), 1, added=0.3)
    colourful = digital.saturate(image, rng(), 1, factor=2, added=0.1)
    for pixel in np.ndindex(6, 7):
        h, s, v = colorsys.rgb_to_hsv(*map(float, image[pixel]))
        assert np.allclose(brighter[pixel], colorsys.hsv_to_rgb(h, s, min(v + 0.3, 1)), atol=1e-5)
        assert np.allclose(colourful[pixel], colorsys.hsv_to_rgb(h, min(2 * s + 0.1, 1), v), atol=1e-5)


def test_contrast_keeps_the_mean_of_each_channel() -> None:
    image = digital.to_float(draw_image(0))
    flat = digital.contrast(image, rng(), 1, factor=0.05)
    assert np.allclose(flat.mean(axis=(0, 1)), image.mean(axis=(0, 1)), atol=1e-5)
    assert np.allclose(flat.std(axis=(0, 1)), 0.05 * image.std(axis=(0, 1)), atol=1e-5)


def test_pixelate_shows_the_means_of_boxes() -> None:
    image = digital.to_float(draw_image(0, 40, 40))
    blocks = digital.pixelate(image, rng(), 1, fraction=0.25).reshape(10, 4, 10, 4, 3)
    assert np.ptp(blocks, axis=(1, 3)).max() == 0
    means = image.reshape(10, 4, 10, 4, 3).mean(axis=(1, 3))
    assert np.allclose(blocks[:, 0, :, 0], means, atol=1.01 / 255)


def test_jpeg_compression_is_pillows() -> None:
    image = picture(64)
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=7)
    corrupted = corrupt(image, "jpeg_compression", 5, rng(), "imagenet")
    assert np.array_equal(np.asarray(corrupted), np.asarray(Image.open(packed)))


def test_elastic_transform_without_strength_is_affine() -> None:
    image = digital.to_float(draw_image(0, 32, 32))
    assert np.array_equal(digital.elastic_transform(image, rng(), 1, strength=0, sigma=0, shift=0), image)
    assert not np.allclose(
        digital.elastic_transform(image, rng(), 1, strength=0, sigma=0, shift=2.56), image, atol=0.01
    )


@pytest.mark.parametrize("scale", [1, 3])
def test_elastic_displacements_have_the_size_of_smoothed_noise(scale: int) -> None:
    side = 224 * scale
    ramp = np.tile(np.arange(side, dtype=np.float32)[:, None], (side, 1, 3)).reshape(side, side, 3)
    moved = digital.elastic_transform(ramp.transpose(1, 0, 2).copy(), rng(), scale, strength=17.08, sigma=2.44, shift=0)
    shifts = (moved - ramp.transpose(1, 0, 2))[20:-20, 20:-20, 0]
    # Uniform noise of deviation 1 / sqrt(3), smoothed over 2 sigma sqrt(pi) pixels each way.
    expected = 17.08 / math.sqrt(3) / (2 * 2.44 * math.sqrt(math.pi)) * scale
    assert shifts.std() == pytest.approx(expected, rel=0.12)


def test_a_combination_is_one_corruption_after_the_other() -> None:
    image, shared = picture(64), rng()
    expected = corrupt(corrupt(image, "fog", 3, shared), "gaussian_noise", 3, shared)
    assert corrupt(image, "fog+gaussian_noise", 3, rng()) == expected
    with pytest.raises(ValueError, match='unknown corruption "rain"'):
        corrupt(image, "fog+rain", 3, rng())


def test_options_are_put_in_order_and_checked() -> None:
    options = CorruptOptions(corruptions=parse_corruptions("hold-out, fog,fog"), severities=(5, 1, 5))
    assert options.corruptions == ("fog", *HOLD_OUTS)
    assert CorruptOptions(corruptions=("snow+fog", "fog")).corruptions == ("fog", "snow+fog")
    assert options.severities == (1, 5)
    assert CorruptOptions().corruptions == STANDARD == parse_corruptions("standard")
    assert parse_corruptions("all") == CORRUPTIONS
    for wrong in ({"corruptions": ()}, {"severities": (0,)}, {"size": 0}, {"limit": 0}, {"jobs": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))[:6]):
            CorruptOptions(**wrong)
    with pytest.raises(UsageError, match=r'"Darkness"; none darkens images, but docs/corruptions.md tells how to make'):
        CorruptOptions(corruptions=("fog+Darkness",))
    with pytest.raises(UsageError, match='unknown corruption "fo"; did you mean fog'):
        CorruptOptions(corruptions=("snow+fo",))
