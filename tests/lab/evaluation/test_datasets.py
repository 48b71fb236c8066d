"""Labelled domains on disk, in every layout."""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remtta.errors import UsageError
from remtta.lab.corruptions import STANDARD
from remtta.lab.evaluation.class_maps import map_classes, read_class_map
from remtta.lab.evaluation.datasets import class_names, open_dataset, read_image_list
from remtta.lab.evaluation.domains import Dataset, default_order, wanted_domains
from remtta.lab.evaluation.options import ClassOrder
from tests.conftest import draw_folder, draw_image
from tests.lab.evaluation.trees import CLASSES, open_tree, write_tree


def test_an_imagenet_c_tree_comes_in_the_standard_order_with_its_classes(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c"))
    assert [domain.title for domain in dataset.domains] == ["gaussian_noise5", "fog5", "my_own5"]
    assert dataset.domains[1].labels.tolist() == [number for number in range(7) for _ in range(3)]
    assert dataset.sizes == {(32, 32): 63}
    assert dataset.report() == (
        f"{tmp_path / 'c'}: ImageNet-C tree, 3 domains, 63 images, 32x32 pixels, 7 classes by alphabetical order"
    )


@pytest.mark.parametrize(
    ("names", "all_", "expected"),
    [
        (["fog", "shot_noise", "saturate"], False, ["shot_noise", "fog"]),
        (["fog", "shot_noise", "saturate"], True, ["shot_noise", "fog", "saturate"]),
        (["saturate", "spatter"], False, ["spatter", "saturate"]),
        (["b10", "b2", "fog_3d", "near_focus"], False, ["near_focus", "fog_3d", "b2", "b10"]),
        (list(reversed(STANDARD)), False, list(STANDARD)),
    ],
)
def test_domains_have_the_fields_order(names: list[str], all_: bool, expected: list[str]) -> None:
    assert default_order(iter(names), all_) == expected


@pytest.mark.parametrize(
    ("domains", "severities", "classes", "layout", "titles"),
    [
        (["fog", "my_own"], (), CLASSES, "tree of domains", ["fog", "my_own"]),
        (["."], (), CLASSES, "one domain of class folders", ["data"]),
        (["."], (3, 5), CLASSES, "one corruption by severity", ["data5"]),
        (
            ["noise/impulse_noise", "weather/fog"],
            (5,),
            CLASSES,
            "ImageNet-C tree in groups",
            ["impulse_noise5", "fog5"],
        ),
        (["day", "night"], (), ["1", "2", "5"], "tree of domains", ["day", "night"]),
        (["fog"], (5,), ["1", "2"], "ImageNet-C tree", ["fog5"]),
    ],
)
@pytest.mark.parametrize("cluttered", [False, True])
def test_layouts_are_told_apart(
    domains: list[str],
    severities: tuple[int, ...],
    classes: list[str],
    layout: str,
    titles: list[str],
    cluttered: bool,
    tmp_path: Path,
) -> None:
    root = write_tree(tmp_path / "data", domains, severities, classes)
    for name in ("__MACOSX/fog/._0.png", "@eaDir/0.png", "._0.png", "Thumbs.db", "overview.png") if cluttered else ():
        for folder in (root, next(path for path in root.rglob(classes[0]))):
            if name != "overview.png" or folder == root:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"no picture")
    dataset = open_tree(root)
    assert (dataset.layout, [domain.title for domain in dataset.domains]) == (layout, titles)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domains": ["fog", "snow"]}, r"no domain snow; it has gaussian_noise, fog, my_own; name"),
        ({"severities": (3,)}, "has no severity 3; it has 5"),
        ({"severities": (5, 5)}, "severity 5 is given twice"),
        ({"domains": ["fog", "my_own", "fog"]}, "domain fog is given twice; --scenario recurring"),
        ({"class_map": dict.fromkeys(CLASSES[1:], 0)}, "1 class folder not in .*: class_a"),
        ({"class_map": dict.fromkeys(CLASSES, 7)}, "not among the model's 7 classes"),
        ({"image_list": ["class_a/0.png", "class_a/9.png"]}, "lacks 1 of .* 2 images, such as class_a/9"),
    ],
)
def test_what_is_missing_is_reported_before_any_work(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        open_tree(write_tree(tmp_path / "c"), **changes)


def test_an_empty_domain_a_domain_in_two_groups_and_a_tree_without_labels_are_refused(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "c")
    for path in (root / "fog" / "5").rglob("*.png"):
        path.unlink()
    with pytest.raises(UsageError, match="fog5 is empty"):
        open_tree(root)
    for severity in "12":
        draw_folder(tmp_path / "bare" / "fog" / severity, [0], "a.png")
    (tmp_path / "bare" / "corrupt.json").touch()
    with pytest.raises(UsageError, match=r"without class folders.* list them in a --labels-file"):
        open_tree(tmp_path / "bare")
    with pytest.raises(UsageError, match=r"has fog in train/ and in val/; name one of these folders as ROOT"):
        open_tree(write_tree(tmp_path / "splits", ["train/fog", "val/fog"]))
    with pytest.raises(UsageError, match=r"name is not UTF-8, 'f\\udcffog'; rename it"):
        wanted_domains(root, ["f\udcffog"], None, complete=False, by_severity=True)


def test_files_that_are_not_read_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remtta")
    root = write_tree(tmp_path / "c", ["fog", "snow"], severities=())
    for name in ("fog/class_a/a.heic", "fog/class_b/b.HEIC", "snow/class_a/notes.txt", "snow/class_a/._0.png", "x.pdf"):
        (root / name).touch()
    (root / "snow" / "class_a" / "more").mkdir()
    open_tree(root)
    assert caplog.messages == [f"ignored files in {root}: 2 .heic, 1 .txt, 1 folder, 1 hidden"]
    for path in root.rglob("*.png"):
        path.unlink()
    with pytest.raises(UsageError, match=r"c: 2 \.heic, 1 \.pdf, 1 \.txt, and no images in this folder or below"):
        open_tree(root)
    draw_image(0).save(root / "snow" / "class_a" / "0.png")
    with pytest.raises(UsageError, match=r"^fog is empty: 2 \.heic, and no images below"):
        open_tree(root)


def test_domains_of_unequal_size_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_tree(tmp_path / "c", ["fog", "snow"])
    (root / "fog" / "5" / "class_a" / "0.png").unlink()
    open_tree(root)
    assert caplog.messages == ["the domains differ in their number of images: snow5 21, fog5 20"]


NUMBERS = [str(number) for number in range(12)]
MIXED = ["b2", "b10", "c", "d", "e", "Table", "TV"]


@pytest.mark.parametrize(
    ("names", "order", "numbers", "warning"),
    [
        (
            MIXED,
            None,
            [3, 2, 4, 5, 6, 1, 0],
            "in alphabetical order, TV before b2, .* timm has b2 before TV: .* number$",
        ),
        (MIXED, "number", [0, 1, 2, 3, 4, 5, 6], None),
        (
            NUMBERS,
            None,
            range(12),
            "in number order, 2 before 10, .* ImageFolder has 10 before 2: .* --class-order name$",
        ),
        (NUMBERS, "name", [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3], None),
        (NUMBERS[:10], None, range(10), None),
        ([f"{number:02}" for number in range(12)], None, range(12), None),
    ],
)
def test_class_folders_come_in_either_order_and_an_unclear_one_is_pointed_out(
    names: list[str],
    order: ClassOrder | None,
    numbers: Sequence[int],
    warning: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mapped = map_classes(names, num_classes=len(names), order=order)
    assert [mapped.numbers[name] for name in names] == list(numbers)
    assert [bool(re.search(warning or "", message)) for message in caplog.messages] == [True] * bool(warning)
    assert (mapped.other_order is None) == (order is None and warning is None)


def test_folders_in_decomposed_unicode_match_composed_labels(tmp_path: Path) -> None:
    names = [unicodedata.normalize("NFD", name) for name in ("Möwe", "café", "Kröte")]
    root = write_tree(tmp_path / "d", ["fog"], (), names, each=1)
    image = f"{names[0]}/0.png"
    assert Path(
        open_dataset(root, num_classes=3, labels=["Kröte", "Möwe", "café"], image_list=[image]).domains[0].sources[0]
    ).is_file()
    for known in ({"labels": ["Kröte", "Möwe", "café"]}, {"class_map": {"Kröte": 0, "Möwe": 1, "café": 2}}):
        (domain,) = open_dataset(root, num_classes=3, **known).domains
        assert {
            Path(path).parent.name: label for path, label in zip(domain.sources, domain.labels, strict=True)
        } == dict(zip(names, (1, 2, 0), strict=True))


def test_layouts_that_need_a_step_before_are_told_so(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tiny", ["n01443537", "n01629819"], (), ["images"], each=1)
    with pytest.raises(
        UsageError, match=r"as Tiny ImageNet: move the images of each class up into its folder, or list"
    ):
        open_tree(root)
    (tmp_path / "nested" / "CIFAR-10-C").mkdir(parents=True)
    np.save(tmp_path / "nested" / "CIFAR-10-C" / "labels.npy", [0])
    with pytest.raises(UsageError, match=r"no images .*; name the folder of arrays as ROOT: .*nested/CIFAR-10-C$"):
        open_tree(tmp_path / "nested")


def test_a_limit_takes_the_same_images_of_every_domain(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "c")
    for loop in (tree / "loop", next(tree.glob("fog/5/*")) / "loop.png"):
        loop.symlink_to(loop.name)
    first, *others = names_of(open_tree(tree, limit=8))
    assert len(first) == 8 and others == [first, first]
    left_out = next(name for name in names_of(open_tree(tree))[0] if name not in first)
    for name in (left_out, first[0]):
        (tree / "fog" / "5" / name).unlink()
    again, fog, other = names_of(open_tree(tree, limit=8))
    assert again == other == first and len(fog) == 8 and set(first) - set(fog) == {first[0]}
    for path in (tree / "my_own").rglob("*.png"):
        path.rename(path.with_stem(f"{path.stem}_my_own"))
    assert [name.replace("_my_own", "") for name in names_of(open_tree(tree, limit=8))[2]] == first


def names_of(dataset: Dataset) -> list[list[str]]:
    return [["/".join(source.split("/")[-2:]) for source in domain.sources] for domain in dataset.domains]


def test_an_image_list_gives_the_images_and_their_order(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("val/class_c/1.png 2\nclass_a/0.png\n\nclass_b/2.png\n")
    names = read_image_list(tmp_path / "list.txt")
    assert names == ["class_c/1.png", "class_a/0.png", "class_b/2.png"]
    dataset = open_tree(write_tree(tmp_path / "c"), image_list=names)
    assert names_of(dataset) == [names] * 3
    for domain in dataset.domains:
        # Only three of the seven folders are in use, and still each has its own number.
        assert domain.labels.tolist() == [2, 0, 1]
    (tmp_path / "bare.txt").write_text("0.png\n")
    (tmp_path / "spaces.txt").write_text("val/my dog/a photo.png 2\nmy dog/photo 3.png\nmy dog/4.png\t5 my dog \n")
    names = ["my dog/a photo.png", "my dog/photo 3.png", "my dog/4.png"]
    assert read_image_list(tmp_path / "spaces.txt") == names
    with pytest.raises(UsageError, match="needs lines such as"):
        read_image_list(tmp_path / "bare.txt")


def test_the_only_severity_is_evaluated_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tree(tmp_path / "c", ["fog", "snow"], severities=(3,), each=1)
    with caplog.at_level("INFO", logger="remtta"):
        assert [domain.title for domain in open_tree(tmp_path / "c").domains] == ["snow3", "fog3"]
    assert f"{tmp_path / 'c'} has only severity 3, which is evaluated" in caplog.messages
    with pytest.raises(UsageError, match=r"has no severity 5; it has 3$"):
        open_tree(tmp_path / "c", severities=(5,))
    write_tree(tmp_path / "c", ["fog"], severities=(1,), each=1)
    assert [domain.title for domain in open_tree(tmp_path / "c", domains=["snow"]).domains] == ["snow3"]
    with pytest.raises(UsageError, match="has no severity 5; it has 1, 3: choose with --severity"):
        open_tree(tmp_path / "c")
    write_tree(tmp_path / "c", ["snow"], severities=(5,), each=1)  # the usual one, but not of every domain
    with pytest.raises(UsageError, match=r"fog in .* has no severity 5; it has 1, 3"):
        open_tree(tmp_path / "c")


def test_wnids_are_mapped_by_wnid_and_by_position_only_in_a_head_of_as_many() -> None:
    mapped = map_classes(["n01443537", "n15075141", "n01440764"], num_classes=1000)
    assert mapped.numbers == {"n01440764": 0, "n01443537": 1, "n15075141": 999}
    assert mapped.matched_by == "wnid"
    assert map_classes(["n01443537", "n01440764"], num_classes=2).numbers == {"n01440764": 0, "n01443537": 1}
    with pytest.raises(UsageError, match=r"\(1\) is not the model's \(7\); name every class's folder in --labels, or"):
        map_classes(["n01443537"], num_classes=7)
    with pytest.raises(UsageError, match=r"1 class folder not in ImageNet's wnids for 1000 classes: n00000000"):
        map_classes(["n01443537", "n00000000"], num_classes=1000)


def test_numbers_names_and_alphabetical_order() -> None:
    assert map_classes(["10", "2", "999"], num_classes=1000).numbers == {"10": 10, "2": 2, "999": 999}
    assert map_classes(["2", "10"], num_classes=12, labels=sorted(map(str, range(12)))).numbers == {"10": 2, "2": 4}
    labels = ["Stop sign", "give_way", "bend right"]
    assert map_classes(["give way", "stop_sign"], num_classes=3, labels=labels).numbers == {
        "give way": 1,
        "stop_sign": 0,
    }
    signs = ["A-", "A", "A+"]  # the same without punctuation
    assert map_classes(signs, num_classes=3, labels=signs).numbers == {"A": 1, "A+": 2, "A-": 0}
    for labels in (["a.", "b", "a!"], ["crane", "b", "crane"]):
        with pytest.raises(UsageError, match=r"several of the model's class names fit (a|crane); give --class-map"):
            map_classes([labels[0].strip("."), "b"], num_classes=3, labels=labels)
    assert map_classes(["b", "c", "a"], num_classes=3).numbers == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(UsageError, match=r"their number \(2\) is not the model's \(3\); name every class's folder in"):
        map_classes(["a", "b"], num_classes=3)
    with pytest.raises(
        UsageError, match=r"no class of the model is named c \(1 of 3 class folders\); correct the names"
    ):
        map_classes(["a", "b", "c"], num_classes=3, labels=["b", "a", "kitten"])
    with pytest.raises(UsageError, match="not among the model's 3 classes"):
        map_classes(["0", "3"], num_classes=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.txt", "a 1\nmy dog,0\n"),
        ("map.tsv", "a\t1\nmy dog\t0\n"),
        ("timm.txt", "my dog\na\n"),
        ("map.json", '{"a": 1, "my dog": 0}'),
        ("list.json", '["my dog", "a"]'),
        ("config.json", '{"id2label": {"0": "my dog", "1": "a"}}'),
    ],
)
def test_class_maps_come_as_lines_or_json(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_class_map(tmp_path / name) == {"a": 1, "my dog": 0}


@pytest.mark.parametrize(
    "wrong", ["a 1\na class without its number", "a 1\na 2\n", "[" * 100_000, '{"a": 1e999}', f"a{' ' * 10**6}b\na 1"]
)
def test_what_is_no_class_map_is_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / f"map.{'json' if wrong[0] in '[{' else 'txt'}"
    path.write_text(wrong)
    with pytest.raises(UsageError, match="is not a class map"):
        read_class_map(path)


def test_only_folders_with_names_name_the_classes_of_a_zero_shot_model(tmp_path: Path) -> None:
    write_tree(tmp_path / "named", ["fog"], (), ["tree_frog", "ship"], each=1)
    assert class_names(tmp_path / "named") == ["ship", "tree frog"]
    assert class_names(write_tree(tmp_path / "imagenet", ["fog"], (), ["n01440764"], each=1)) is None
    with pytest.raises(UsageError, match="name them with --labels FILE"):
        class_names(write_tree(tmp_path / "numbers", ["fog"], (), ["0", "1"], each=1))
