"""An evaluation on images of the input size."""

from pathlib import Path

import pytest

from remtta.errors import UsageError
from remtta.lab.evaluation.preprocessing import choose_preprocessing
from remtta.models.preprocessing import preprocessing_of
from tests.conftest import draw_image, tiny_vit
from tests.lab.evaluation.trees import open_tree, write_tree


def test_images_of_the_input_size_are_taken_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = tiny_vit()
    configured = preprocessing_of(model)
    assert configured.crop_pct == 0.9
    same = open_tree(write_tree(tmp_path / "same"))
    assert choose_preprocessing(model, same).crop_pct == 1.0
    assert choose_preprocessing(model, same, resize="always") == configured
    other = open_tree(write_tree(tmp_path / "other", size=40))
    assert choose_preprocessing(model, other) == configured
    assert caplog.text.count("are used as they are; adapt crops (--resize always)") == 1
    with pytest.raises(UsageError, match="0 of 63 images have the model's input size of 32x32"):
        choose_preprocessing(model, other, resize="never")
    draw_image(0, 32, 32).save(tmp_path / "other" / "fog" / "5" / "class_a" / "0.png")
    with pytest.raises(UsageError, match=r"1 of 63 images .* \(sizes: 40x40, 32x32\); choose --resize always"):
        choose_preprocessing(model, open_tree(tmp_path / "other"))
