"""Stored streams of CCC, in tar files."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from remtta.errors import FrameError, StreamError, UsageError
from remtta.evaluation.datasets import class_names
from remtta.evaluation.runner import evaluate
from remtta.options import EvalOptions
from tests.conftest import draw_image, tiny_vit
from tests.evaluation.trees import open_tree
from tests.records import rows_of

STREAM = "baseline_20_transition+speed_1000_seed_43"


def write_shard(path: Path, labels: list[int | str], first: int = 0) -> None:
    """Samples as webdataset writes them: the image after its class and what was done to it."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for place, label in enumerate(labels):
            image = io.BytesIO()
            draw_image(first + place, 32, 32).save(image, "png")
            content = {"info": b"++n1++snow++s1++1.25++n2++fog++s2++0.5", "input.jpg": image.getvalue()}
            for name, data in {**content, "output.cls": str(label).encode()}.items():
                member = tarfile.TarInfo(f"sample_{place}.{name}")
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


def test_a_stored_stream_is_evaluated_as_it_comes(stream: Path, tmp_path: Path) -> None:
    options = EvalOptions(order="stored", batch_size=2)
    evaluate(tiny_vit(), open_tree(stream), tmp_path / "out", methods=["tent"], options=options)
    assert [(row["domain"], row["label_true"]) for row in rows_of(tmp_path / "out")] == [
        (STREAM, label) for label in (1, 4, 1, 6, 2)
    ]


def test_a_stored_stream_goes_to_workers(stream: Path) -> None:
    domain = pickle.loads(pickle.dumps(open_tree(stream))).domains[0]
    assert np.array_equal(np.asarray(domain.load(3)), np.asarray(draw_image(3, 32, 32)))


def test_what_is_no_such_stream_is_refused(stream: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --domains, --severity, --image-list, --class-map out"):
        open_tree(stream, domains=["snow"])
    with pytest.raises(UsageError):
        class_names(stream)
    others: list[tuple[list[int | str], str]] = [
        ([7], "names class 7"),
        (["cat"], "no number"),
        ([], "none with <key>"),
    ]
    for labels, reason in others:
        write_shard(tmp_path / "other/serial_0.tar", labels)
        with pytest.raises(UsageError, match=reason):
            open_tree(tmp_path / "other")
    (tmp_path / "other/serial_0.tar").write_bytes(b"no tar")
    with pytest.raises(StreamError, match="cannot be read"):
        open_tree(tmp_path / "other")
    domain = open_tree(stream).domains[0]
    (stream / "serial_9.tar").write_bytes(b"replaced meanwhile")
    with pytest.raises(FrameError, match="cannot be decoded"):
        domain.load(0)
