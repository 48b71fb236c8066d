"""Labelled images from a list."""

from __future__ import annotations

from pathlib import Path

import pytest

from remtta.errors import UsageError
from tests.command import remtta_here
from tests.conftest import NUM_CLASSES, TINY_OPTIONS, draw_folder
from tests.evaluation.trees import open_tree
from tests.records import json_of, rows_of

NAMES = [f"name {number}" for number in range(NUM_CLASSES - 2)] + ["twice", "twice"]


def test_a_list_gives_the_images_their_classes_and_the_order(tmp_path: Path) -> None:
    draw_folder(tmp_path / "frames", range(3))
    first, second, third = sorted(path.name for path in (tmp_path / "frames").iterdir())
    listed = tmp_path / "mine.csv"
    listed.write_text(f"frames/{third},2\n\n{tmp_path}/frames/{first}\tname 1\nframes/{second}, 0 \n")
    dataset = open_tree(tmp_path, labels_file=listed, labels=NAMES)
    (domain,) = dataset.domains
    assert [Path(source).name for source in domain.sources] == [third, first, second]
    assert domain.labels.tolist() == [2, 1, 0]
    assert (domain.title, dataset.shuffled, sum(dataset.sizes.values())) == ("mine", False, 3)
    assert domain.load(0).mode == "RGB"
    assert len(open_tree(tmp_path, labels_file=listed, labels=NAMES, limit=2).domains[0].sources) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.png\n", 'needs lines such as frames/1.png,3, got "0.png"'),
        ("", "needs lines such as"),
        ("0.png,77\n", 'the model has no class "77"'),
        ("0.png,twice\n", 'the model has no class "twice"'),
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
    with pytest.raises(UsageError, match="leave --domains, --severity, --image-list, --class-map out"):
        open_tree(tmp_path, labels_file=tmp_path / "mine.csv", severities=[5])


def test_the_command_measures_on_a_list(tmp_path: Path, checkpoint: Path) -> None:
    frames = draw_folder(tmp_path / "frames", range(4))
    names = sorted(path.name for path in frames.iterdir())
    (tmp_path / "mine.csv").write_text("".join(f"{name},{number % 2}\n" for number, name in enumerate(names)))
    args: list[str | Path] = [
        "--labels-file",
        tmp_path / "mine.csv",
        "--no-plots",
        "-b",
        "2",
        "--output",
        tmp_path / "out",
        "-q",
    ]
    assert remtta_here("eval", frames, *TINY_OPTIONS, "--checkpoint", checkpoint, *args) == 0
    results = json_of(tmp_path / "out" / "results.json")
    assert list(results["methods"]["source"]["error"]) == ["mine"]
    rows = [row for row in rows_of(tmp_path / "out") if row["method"] == "source"]
    assert [(Path(row["source"]).name, row["label_true"]) for row in rows] == [
        (name, number % 2) for number, name in enumerate(names)
    ]
