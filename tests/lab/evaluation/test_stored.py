"""Arrays of CIFAR-C, stored streams of CCC, and lists."""

import gzip
import io
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from remtta.errors import FrameError, StreamError, UsageError
from remtta.lab.evaluation.datasets import class_names, open_dataset
from tests.command import remtta_here
from tests.conftest import NUM_CLASSES, TINY_OPTIONS, draw_folder, draw_image, png
from tests.lab.evaluation.trees import open_tree, write_tree
from tests.records import json_of, rows_of

STREAM = "baseline_20_transition+speed_1000_seed_43"
NAMES = [f"name {number}" for number in range(NUM_CLASSES - 2)] + ["twice", "twice"]


def write_arrays(root: Path, rows: int = 4, short_labels: bool = False) -> Path:
    root.mkdir()
    rng = np.random.default_rng(0)
    for name in ("fog", "gaussian_noise"):
        np.save(root / f"{name}.npy", rng.integers(256, size=(5 * rows, 32, 32, 3), dtype=np.uint8))
    (root / "._fog.npy").write_bytes(b"left by macOS")
    np.save(root / "labels.npy", np.tile(np.arange(rows), 1 if short_labels else 5).astype(np.uint8))
    return root


@pytest.mark.parametrize("short_labels", [False, True])
def test_rows_of_an_array_belong_to_their_severity(short_labels: bool, tmp_path: Path) -> None:
    root = write_arrays(tmp_path / "c10", short_labels=short_labels)
    dataset = open_tree(root, severities=(2, 5), domains=["fog"])
    second, fifth = dataset.domains
    assert (second.title, fifth.title) == ("fog2", "fog5")
    assert second.labels.tolist() == [0, 1, 2, 3]
    pixels = np.load(root / "fog.npy")
    assert np.array_equal(np.asarray(fifth.load(1)), pixels[17])
    assert fifth.sources[1] == f"{root / 'fog.npy'}[17]"
    assert not dataset.shuffled
    with pytest.raises(UsageError, match="leave --image-list out"):
        open_tree(root, image_list=["class_a/0.png"])


def _spoil(content: np.ndarray, name: str) -> Callable[[Path], object]:
    return lambda root: np.save(root / name, content)


def _archive(path: Path) -> None:
    with open(path, "wb") as file:  # `savez` appends .npz to names
        np.savez(file, images=np.zeros((20, 32, 32, 3), np.uint8))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoil(np.zeros((20, 32, 32), np.uint8), "fog.npy"), "fog.npy must hold 5 severities"),
        (_spoil(np.zeros((20, 32, 32, 3), np.float32), "fog.npy"), "fog.npy must hold 5 severities"),
        (_spoil(np.zeros((15, 32, 32, 3), np.uint8), "fog.npy"), "has 15 images, but labels.npy has 20 labels"),
        (_spoil(np.arange(20) % 7, "labels.npy"), "labels.npy differs between the fifths of"),
        (_spoil(np.full(20, 7), "labels.npy"), "names class 7, but the model has 7"),
        (_spoil(np.arange(20) % 7 - 1, "labels.npy"), "names class -1, but the model has 7"),
        (_spoil(np.zeros((20, 2), np.int64), "labels.npy"), "must hold one whole number per image"),
        (lambda root: (root / "fog.npy").write_bytes(b"no array"), "fog.npy cannot be read as an array"),
        (lambda root: _archive(root / "fog.npy"), "fog.npy cannot be read as an array .*; write it with numpy.save"),
        (lambda root: _archive(root / "labels.npy"), "labels.npy cannot be read as an array"),
        (lambda root: [path.unlink() for path in root.glob("[fg]*.npy")], "has labels.npy but no"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    root = write_arrays(tmp_path / "c10")
    spoil(root)
    with pytest.raises(UsageError, match=message):
        open_tree(root)


def test_images_of_arrays_reach_a_worker_as_the_name_of_their_file(tmp_path: Path) -> None:
    root = write_arrays(tmp_path / "c10")
    (domain,) = open_tree(root, severities=(3,), domains=["fog"]).domains
    pickled = pickle.dumps(domain)
    assert len(pickled) < 2000
    assert np.array_equal(np.asarray(pickle.loads(pickled).load(1)), np.load(root / "fog.npy")[9])


def write_shard(path: Path, labels: list[int | str], first: int = 0) -> None:
    """Samples as webdataset writes them: the image after its class and what was done to it."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, label in enumerate(labels):
            content = {"info": b"++n1++snow++s1++1.25++n2++fog++s2++0.5", "input.jpg": png(first + number, 32, 32)}
            for name, data in {**content, "output.cls": str(label).encode()}.items():
                member = tarfile.TarInfo(f"sample_{number}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Shards whose names sort otherwise by letter, and whose keys are the same."""
    write_shard(tmp_path / STREAM / "serial_10.tar", [6, 2], first=3)
    write_shard(tmp_path / STREAM / "serial_9.tar", [1, 4, 1])
    return tmp_path / STREAM


def test_a_stored_stream_is_one_domain_in_its_own_order(stream: Path) -> None:
    dataset = open_tree(stream)
    (domain,) = dataset.domains
    assert domain.title == STREAM and domain.labels.tolist() == [1, 4, 1, 6, 2]
    assert (dataset.layout, dataset.shuffled, dataset.sizes) == ("CCC shards", False, {(32, 32): 5})
    assert domain.sources[3] == f"{stream / 'serial_10.tar'}[sample_0]"
    assert np.array_equal(np.asarray(domain.load(3)), np.asarray(draw_image(3, 32, 32)))
    assert open_tree(stream, limit=2).domains[0].labels.tolist() == [1, 4]


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_the_command_measures_on_a_stored_stream_as_it_comes(
    engine: str, stream: Path, checkpoint: Path, tmp_path: Path
) -> None:
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--methods", "source,tent", "-q"]
    options += ["-b", "2", "--no-plots", "--engine", engine, "--jobs", "1", "--output", tmp_path / "out"]
    assert remtta_here("eval", stream, *options) == 0
    assert [(row["method"], row["domain"], row["label_true"]) for row in rows_of(tmp_path / "out")] == [
        (method, STREAM, label) for method in ("source", "tent") for label in (1, 4, 1, 6, 2)
    ]
    assert json_of(tmp_path / "out" / "results.json")["settings"]["data"]["layout"] == "CCC shards"


def test_invalid_tar_streams_are_refused(stream: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --domains out"):
        open_tree(stream, domains=["snow"])
    with pytest.raises(UsageError):
        class_names(stream)
    others: list[tuple[list[int | str], str]] = [([7], "names class 7"), (["cat"], "not a number")]
    others.append((["x" * 5000], f"invalid literal for int.. with base 10: b'{'x' * 20}'$"))  # of any length
    for labels, reason in others:
        write_shard(tmp_path / "other/serial_0.tar", labels)
        with pytest.raises(UsageError, match=reason):
            open_tree(tmp_path / "other")
    with tarfile.open(tmp_path / "other/serial_0.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.input.jpg"))
    with pytest.raises(UsageError, match="none with <key>"):
        open_tree(tmp_path / "other")
    whole = (stream / "serial_9.tar").read_bytes()
    (tmp_path / "other/serial_0.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(StreamError, match="cannot be read as a tar file, uncompressed"):
        open_tree(tmp_path / "other")
    (tmp_path / "other/serial_0.tar").write_bytes(b"no tar")
    with pytest.raises(StreamError, match="cannot be read"):
        open_tree(tmp_path / "other")
    domain = open_tree(stream).domains[0]
    (stream / "serial_9.tar").write_bytes(b"replaced meanwhile")
    with pytest.raises(FrameError, match="cannot be decoded"):
        domain.load(0)


@pytest.mark.parametrize("name", ["fog", "."])
def test_archives_of_folders_are_no_stream(name: str, tmp_path: Path) -> None:
    root, archive = write_tree(tmp_path / "c", ["fog"]), tmp_path / "weather.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root / name, name)
    shutil.rmtree(root)
    with pytest.raises(UsageError, match=r"no images .*, but tar files, not CCC's: unpack them"):
        open_tree(tmp_path)
    write_tree(tmp_path, ["fog"])  # as unpacked; Python 3.11.3 cannot filter what it extracts
    assert open_tree(tmp_path, domains=["fog"]).layout == "ImageNet-C tree"


def test_a_list_gives_the_images_their_classes_and_the_order(tmp_path: Path) -> None:
    draw_folder(tmp_path / "frames", range(3))
    first, second, third = sorted(path.name for path in (tmp_path / "frames").iterdir())
    listed = tmp_path / "mine.csv"
    listed.write_text(f"frames/{third},2\n\n{tmp_path}/frames/{first}\tname 1\nframes/{second}, 0 \n")
    dataset = open_tree(tmp_path, labels_file=listed, labels=NAMES)
    (domain,) = dataset.domains
    assert [Path(source).name for source in domain.sources] == [third, first, second]
    assert domain.labels.tolist() == [2, 1, 0] and "3 classes by class name or number" in dataset.report()
    assert (domain.title, dataset.shuffled, sum(dataset.sizes.values())) == ("mine", False, 3)
    assert domain.load(0).mode == "RGB"
    assert len(open_tree(tmp_path, labels_file=listed, labels=NAMES, limit=2).domains[0].sources) == 2


@pytest.mark.parametrize(
    "text",
    [
        "path,label\na, b.png,name 1\nc.png,2\n",
        '"image_path","class_name"\n"a, b.png","name 1"\n"c.png","2"\n',
        "File;Class ID\na, b.png;1\nc.png;2\n",
        "a, b.png;1\r\nc.png;2\r\n",
        "1,a, b.png\n2,c.png\n",
        "a, b.png\t1.0\nc.png\t2.0\n",
        "2 c.png\n1\ta, b.png\n",
        'id,split,target,file\n0,val,1,"a, b.png"\n1,val,2,c.png\n',
        "\ufeffname 1;a, b.png\n2;c.png\n",
    ],
)
def test_a_list_may_be_any_csv(text: str, tmp_path: Path) -> None:
    for name in ("a, b.png", "c.png"):
        draw_image(0).save(tmp_path / name)
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8", newline="")
    (domain,) = open_tree(tmp_path, labels_file=tmp_path / "mine.csv", labels=NAMES).domains
    found = zip(domain.sources, domain.labels.tolist(), strict=True)
    assert {Path(source).name: label for source, label in found} == {"a, b.png": 1, "c.png": 2}


@pytest.mark.parametrize(("label", "expected"), [("name 1", "1 class by class name"), ("1", "1 class by number")])
def test_the_report_says_how_a_list_names_its_classes(label: str, expected: str, tmp_path: Path) -> None:
    (image,) = draw_folder(tmp_path / "frames", range(1)).iterdir()
    (tmp_path / "mine.csv").write_text(f"{image},{label}\n")
    assert open_tree(tmp_path, labels_file=tmp_path / "mine.csv", labels=NAMES).report().endswith(expected)


def test_a_list_may_name_wnids(tmp_path: Path) -> None:
    (image,) = draw_folder(tmp_path / "frames", range(1)).iterdir()
    (tmp_path / "mine.txt").write_text(f"{image},n01496331\n{image}\tn01496331\n{image} n01496331\n")
    dataset = open_dataset(tmp_path, num_classes=1000, labels_file=tmp_path / "mine.txt")
    assert dataset.domains[0].labels.tolist() == [5, 5, 5] and set(dataset.domains[0].sources) == {str(image)}
    with pytest.raises(UsageError, match="it has 7 classes, from 0; --labels gives"):
        open_dataset(tmp_path, num_classes=7, labels_file=tmp_path / "mine.txt")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.png\n", 'needs lines such as frames/1.png,3, got "0.png"'),
        ("", "needs lines such as"),
        ("0.png,7\n", 'the model has no class "7"; it has 7 classes, from 0'),
        ("0.png,twice\n", 'the model has no class "twice".* has a comma, separate'),
        ("0.png,1\n0.png,2\n", "lists 0.png with two classes"),
        ("photo,species\n0.png,1\n", 'begins with "photo,species", which names no image; .* class or label'),
        ("class_1.png,1\n0.png,1\n", 'begins with "class_1.png,1", which names no image'),
        ("path,label\n0.png\n", 'needs lines such as frames/1.png,3, got "0.png"'),
        ("path,label\n", "needs lines such as"),
        ("1.png,1\n2.png,1\n", "2 images of .* are missing, such as .*1.png"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "0.png").touch()
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(UsageError, match=f"--labels-file: .*{reason}"):
        open_tree(tmp_path, labels_file=tmp_path / "mine.csv", labels=NAMES)


def test_a_list_leaves_nothing_else_to_choose(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        open_tree(tmp_path, labels_file=tmp_path / "mine.csv")
    with pytest.raises(UsageError, match="leave --severity, --class-order out"):
        open_tree(tmp_path, labels_file=tmp_path / "mine.csv", severities=[5], class_order="name")
