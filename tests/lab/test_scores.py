"""The error of a run on labelled frames."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from remtta.lab.scores import score_run, verdict
from tests.command import refusal_of, remtta_here

NAMES = ("cat", "dog", "tabby, tabby cat", "cow")
RUN, SOURCE = (0, 1, 1, 2, 0, 0), (0, 0, 1, 2, 1, 1)  # what both models predict for the frames


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def write_run(folder: Path, classes: tuple[int, ...] = RUN, method: str = "remtta", **changes: Any) -> Path:
    """A run on six images of two folders, as 0.5.0 would write it but for its batches; then an unreadable one."""
    folder.mkdir()
    record = {"model": {"num_classes": 4, "base_sha256": "0"}, "method": {"name": method}}
    rows = [
        {"index": index, "source": f"frames/{index % 2}/{index // 2}.png", **prediction(number), **changes}
        for index, number in enumerate(classes)
    ]
    rows += [{"gap": True, "source": "frames"}, {"index": 6, "source": "frames/broken.png", "error": "broken"}]
    others = [{"index": i, **prediction(n)} for i, n in enumerate(SOURCE) if n != RUN[i]]
    batches = [
        {"frame": 0, "frames": 3, "source": [row for row in others if row["index"] < 3]},
        {"frame": 3, "frames": 4, "source": [row for row in others if row["index"] >= 3]},
    ]
    (folder / "run.json").write_text(json.dumps(record))
    for name, lines in (("predictions.jsonl", rows), ("batches.jsonl", batches)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def prediction(number: int) -> dict[str, Any]:
    return {"class": number, "label": NAMES[number], "prob": 0.5}


def score(run: Path, text: str, *more: Path) -> dict[str, Any]:
    labels = run.parent / "labels.tsv"
    labels.write_text(text)
    return score_run(run, labels, *more)


def test_errors_and_the_paired_gain_are_those_of_a_calculation_by_hand(run: Path) -> None:
    content = score(run, "0\t0\n1\t1\n2\t1\n3\t0\n4\t1\n5\t0\n")
    # The run errs on frames 3 and 4, the source model on 1, 3 and 5: 2 frames are won and one is lost.
    assert content["frames"] == content["frames_of_source"] == 6
    assert content["error"] == pytest.approx(100 * 2 / 6) and content["source_error"] == pytest.approx(50)
    assert content["error_se"] == pytest.approx(100 * (2 / 6 * 4 / 6 / 6) ** 0.5)
    assert content["gain"] == pytest.approx(100 * 1 / 6) and content["gain_se"] == pytest.approx(100 * 3**0.5 / 6)
    cats, dogs = content["by_class"]
    assert (cats["class"], cats["frames"], round(cats["error"]), round(cats["source_error"])) == ("cat", 3, 33, 67)
    assert (dogs["class"], dogs["frames"], dogs["gain"]) == ("dog", 3, 0)


@pytest.mark.parametrize(
    "text",
    [
        "frames/0/1.png,dog\nframes/1/0.png,dog\n",  # paths
        '"frames/0/1.png";"dog"\n"frames/1/0.png";"dog"\n',
        "/data/frames/0/1.png\tdog\n./frames/1/0.png\tdog\n",  # paths seen from elsewhere
        "image,class\n0/1.png,1\n1/0.png,1\n",  # parts of them
        "dog,0/1.png\ndog,1/0.png\n",  # the class first
        "class,index\n1,2\ndog,1\n",
        "2 1\n1 1\n",
        "saved_000002.png\tdog\nrun/saved_frames/saved_1.png\tdog\n",
        "file,remark,label\nsaved_000002.png,far,dog\nsaved_000001.png,,dog\n",
    ],
)
def test_frames_are_found_by_path_name_index_or_as_saved(run: Path, text: str) -> None:
    content = score(run, text)
    assert (content["frames"], content["error"], content["source_error"]) == (2, 0, 50)
    assert content["by_class"][0]["class"] == "dog" and content["not_in_run"] == []


@pytest.mark.parametrize("text", ["index,class\n2,dog\n-1,cat\n1,dog\n", "-1,1.0\n2.0,1.0\n1.0,1\n"])
def test_indices_beside_a_bad_one_and_those_of_pandas_are_found(run: Path, text: str) -> None:
    content = score(run, text)
    assert (content["frames"], content["error"], content["not_in_run"]) == (2, 0, ["-1"])
    assert content["by_class"][0]["class"] == "dog"


def test_what_does_not_count_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = run.parent / "labels.tsv"
    lines = [
        "0/0.png\tcat",
        "0/0.png\tcat",
        "frames/0/0.png\t0",
        "0/1.png",
        "1/1.png\t",
        "other.png\tcat",
        "9\tcat",
        "1/2.png\tDog",
        "broken.png\tcat",
    ]
    labels.write_text("\n".join(lines) + "\n")
    assert remtta_here("score", run, labels) == 0
    said = capsys.readouterr().out
    assert said.startswith("error 50.0 % (SE 35.4) on 2 labelled frames, source model 50.0 % (SE 35.4): gain +0.0 ")
    assert "without a class: 2 lines\nnot in the run: 2 frames, other.png, 9\n" in said
    assert "could not be read in the run: 1 labelled frame\nwrong in any case, as no prediction is of " in said
    assert said.endswith(" class Dog (did you mean dog?)\n")
    assert remtta_here("score", run, labels, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    told = {name: content[name] for name in ("unlabelled", "not_in_run", "unreadable", "never_predicted")}
    assert told == {"unlabelled": 2, "not_in_run": ["other.png", "9"], "unreadable": 1, "never_predicted": ["Dog"]}


def test_a_clear_gain_and_a_clear_loss_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = tmp_path / "labels.csv"
    for truth, words in ((0, "gain +100.0 points (SE 10.0), better than"), (1, "gain -100.0 points (SE 10.0), worse")):
        run, source = tmp_path / f"{truth}", tmp_path / f"{truth} source"
        write_run(run, (0,) * 100)
        write_run(source, (1,) * 100, "source")
        labels.write_text("".join(f"{index},{truth}\n" for index in range(100)))
        assert remtta_here("score", run, labels, "--source", source) == 0
        said = capsys.readouterr().out
        assert words in said
        assert [
            "80-99",
            "20",
            f"{100 * truth:.1f}",
            f"{100 - 100 * truth:.1f}",
            f"{100 - 200 * truth:+.1f}",
        ] in ([line.split() for line in said.splitlines()])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.png,cat\n", "0.png may be frames/0/0.png, frames/1/0.png; give more of its path"),
        ("0/0.png,cat\n0,dog\n0/0.png,dog\n", "lists 0/0.png with two classes"),
        ("0/0.png,cat\nframes/0/0.png,dog\n", "frame 0 has two classes, cat and dog"),
        ("0/0.png,4\n", "the model has no class 4; it has 4, from 0"),
        ("0/0.png,horse\n", 'no prediction of .* is "horse"; write class or label as in its rows'),
        ("0/0.png,Cow\n", '"Cow"; write class'),
        ("0/0.png,CAT\n", 'no prediction of .* is "CAT"; did you mean cat\\?'),
        ("\x89PNG\0\1", "labels.csv is not a text file; give a TSV or CSV"),
        ("x.png,cat\n", 'the run has no frame "x.png"; a line needs source path'),
        ("9,cat\n", 'the run has no frame "9"; a line needs source path'),
        ("0/0.png\n", "it gives no frame a class; a line needs source path"),
        ("broken.png,cat\n", "none of the labelled frames has a prediction"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    run: Path, text: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = run.parent / "labels.csv"
    labels.write_text(text)
    line = refusal_of(capfd, "score", run, labels)
    assert line.startswith(f"Error: LABELS: {labels}") and re.search(reason, line), line


def test_a_video_is_labelled_by_index(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", source="clip.mp4", frame=0)
    labels = tmp_path / "labels.csv"
    labels.write_text("clip.mp4,cat\n")
    assert "clip.mp4 is no image, so label its frames by their index in" in refusal_of(capfd, "score", run, labels)
    assert score(run, "3,2\n")["error"] == 0


def test_an_unknown_source_model_is_said_and_another_run_stands_in(run: Path, tmp_path: Path) -> None:
    (run / "batches.jsonl").unlink()
    text = "0,0\n1,0\n"
    content = score(run, text)
    assert content["error"] == 50 and content["frames_of_source"] == 0 and "gain" not in content
    source = write_run(tmp_path / "source", SOURCE, "source")
    assert score(run, text, source)["source_error"] == 0
    saved = run / "saved_frames"
    saved.mkdir()
    (saved / "source.jsonl").write_text(json.dumps({"index": 1, **prediction(3)}) + "\n")
    content = score(run, text)
    assert (content["frames_of_source"], content["source_error"], content["gain"]) == (1, 100, 0)
    assert verdict(content).startswith(
        "error 50.0 % (SE 35.4) on 2 labelled frames; on 1 of them 100.0 % (no SE: all wrong), "
        "source model 100.0 % (no SE: all wrong): gain +0.0 points (no SE: equal on each frame), "
    )


def test_only_a_run_of_the_source_model_on_the_same_frames_stands_in(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("0,0\n")
    other = write_run(tmp_path / "other")
    assert "other is not a run with --method source" in refusal_of(capfd, "score", run, labels, "--source", other)
    moved = write_run(tmp_path / "moved", SOURCE, "source", source="elsewhere/0.png")
    line = refusal_of(capfd, "score", run, labels, "--source", moved)
    assert "frame 0 of " in line and "is another one than in" in line
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere} is not the folder of one run" in refusal_of(capfd, "score", nowhere, labels)
