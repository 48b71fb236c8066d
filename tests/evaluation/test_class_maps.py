"""From class folders to the model's class numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from remtta.errors import UsageError
from remtta.evaluation.class_maps import map_classes, read_class_map, zero_shot_names


def test_wnids_are_mapped_by_wnid_and_never_by_position() -> None:
    mapped = map_classes(["n01443537", "n15075141", "n01440764"], num_classes=1000)
    assert mapped.numbers == {"n01440764": 0, "n01443537": 1, "n15075141": 999}
    assert mapped.how == "wnid"
    with pytest.raises(UsageError, match="wnids, but the model has 7 classes; give --class-map"):
        map_classes(["n01443537"], num_classes=7)
    with pytest.raises(UsageError, match=r"1 class folder not in ImageNet's wnids: n00000000"):
        map_classes(["n01443537", "n00000000"], num_classes=1000)


def test_numbers_names_and_alphabetical_order() -> None:
    assert map_classes(["10", "2", "999"], num_classes=1000).numbers == {"10": 10, "2": 2, "999": 999}
    labels = ["Stop sign", "give_way", "bend right"]
    assert map_classes(["give way", "stop_sign"], num_classes=3, labels=labels).numbers == {
        "give way": 1,
        "stop_sign": 0,
    }
    assert map_classes(["b", "c", "a"], num_classes=3).numbers == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(UsageError, match=r"their number \(2\) is not the model's \(3\); give --class-map"):
        map_classes(["a", "b"], num_classes=3)
    with pytest.raises(UsageError, match="not among the model's 3 classes"):
        map_classes(["0", "3"], num_classes=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [("map.txt", "a 1\nmy dog,0\n"), ("map.tsv", "a\t1\nmy dog\t0\n"), ("map.json", '{"a": 1, "my dog": 0}')],
)
def test_class_maps_come_as_lines_or_json(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_class_map(tmp_path / name) == {"a": 1, "my dog": 0}
    for wrong in ("a class without its number", "[" * 100_000, '{"a": 1e999}'):
        (tmp_path / name).write_text(wrong)
        with pytest.raises(UsageError, match="is not a class map"):
            read_class_map(tmp_path / name)


def test_folders_without_names_ask_for_labels() -> None:
    assert zero_shot_names(["n01440764"], Path("d")) is None
    for folders in ([], ["0", "1"]):
        with pytest.raises(UsageError, match="name them with --labels FILE"):
            zero_shot_names(folders, Path("d"))
