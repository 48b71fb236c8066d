"""ONNX files by strangers: read as they are meant, doubted aloud, or refused in one line."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from remtta import Preprocessing
from remtta.errors import CheckpointError, RemttaError, UsageError
from remtta.formats.onnx_model import OnnxClassifier
from remtta.lab.doctor import examine
from remtta.models.info import model_info
from remtta.streams.sources import open_stream
from tests.conftest import draw_folder, random_images
from tests.formats.test_onnx import load
from tests.formats.tiny_onnx import NUM_CLASSES, SIDE, tiny_network, write_onnx

node = helper.make_node


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto] = (),
    tensors: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    change: Callable[[onnx.ModelProto], object] = bool,
    **options: Any,
) -> Path:
    """Write the tiny file with more nodes behind its logits, the last of which returns the output, and a change."""
    proto = onnx.load(write_onnx(path, **options))
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(each), name) for name, each in (tensors or {}).items()
    )
    if names := outputs or [name for each in nodes[-1:] for name in each.output]:
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    change(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def move_weights(place: str) -> Callable[[onnx.ModelProto], None]:
    """Return a change after which the first weights are in another file."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=place))

    return change


def shape_of(proto: onnx.ModelProto) -> Any:
    return proto.graph.input[0].type.tensor_type.shape


def name_axes(proto: onnx.ModelProto) -> None:
    for number, axis in enumerate(shape_of(proto).dim):
        axis.dim_param = f"axis{number}"


def expected(images: Tensor) -> Tensor:
    with torch.no_grad():
        return tiny_network()(images)


AXES: dict[str, Callable[[onnx.ModelProto], object]] = {
    "all named": name_axes,
    "nameless": lambda proto: [axis.Clear() for axis in shape_of(proto).dim],
    "no shape": lambda proto: proto.graph.input[0].type.tensor_type.ClearField("shape"),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("axes", AXES)
def test_axes_without_sizes_are_found_by_running(tmp_path: Path, axes: str, channels_last: bool) -> None:
    path, images = tmp_path / "tiny.onnx", random_images(5)
    write(path, change=AXES[axes], channels_last=channels_last)
    model = load(path, input_size=SIDE)
    torch.testing.assert_close(model(images), expected(images))
    model.head["bias"].data += torch.linspace(-1, 1, NUM_CLASSES)
    model.save(tmp_path / "shifted.onnx", {})
    torch.testing.assert_close(load(tmp_path / "shifted.onnx", input_size=SIDE)(images), model(images))
    info = model_info(load(path))
    assert info.preprocessing.input_size == (224, 224) and info.guessed.endswith(
        "--crop-pct 0.875 --input-size 224 224"
    )
    assert "--input-size" not in model_info(model).guessed


def test_a_known_side_is_kept_and_a_size_inside_is_asked_for(tmp_path: Path) -> None:
    def flatten(proto: onnx.ModelProto) -> None:
        name_axes(proto)
        proto.graph.node[3].input[0] = "relu"  # instead of the pooled features
        weight = next(each for each in proto.graph.initializer if each.name == "fc")
        weight.CopyFrom(numpy_helper.from_array(np.ones((NUM_CLASSES, 12 * 16), np.float32), "fc"))

    path = write(tmp_path / "tiny.onnx", change=flatten)
    with pytest.raises(
        CheckpointError, match=r"on \(1, 3, 224, 224\): .*; if its images have another size, give --inp"
    ):
        load(path)
    assert load(path, input_size=SIDE).image_size == (SIDE, SIDE)
    with pytest.raises(UsageError, match=r"takes images of 1000000 x 1000000, and remtta at most 33,554,432 pixels"):
        load(path, input_size=10**6)
    write(path, change=lambda proto: setattr(shape_of(proto).dim[3], "dim_param", "W"))
    assert load(path).image_size == (SIDE, SIDE)


@pytest.mark.parametrize("batch", ["B", 4])
def test_pixels_that_the_file_normalises_get_no_other_preprocessing(tmp_path: Path, batch: str | int) -> None:
    usual = Preprocessing((SIDE, SIDE))

    def take_pixels(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
        proto.graph.node[0].input[0] = "normalised"
        first = [
            node("Cast", ["images"], ["cast"], to=TensorProto.FLOAT),
            node("Sub", ["cast", "mean"], ["centered"]),
            node("Div", ["centered", "std"], ["normalised"]),
        ]
        rest = list(proto.graph.node)
        del proto.graph.node[:]
        proto.graph.node.extend([*first, *rest])

    tensors = {name: np.float32(getattr(usual, name)).reshape(3, 1, 1) * 255 for name in ("mean", "std")}
    path = write(tmp_path / "tiny.onnx", tensors=tensors, change=take_pixels, batch=batch)
    model, pixels = load(path), (255 * random_images(6).sigmoid()).to(torch.uint8)
    info = model_info(model)
    logits = model(info.preprocessing.normalise(pixels))
    torch.testing.assert_close(logits, expected(usual.normalise(pixels)), atol=1e-4, rtol=0)
    assert info.preprocessing.crop_pct == 1 and info.guessed == "--interpolation bicubic"
    with pytest.raises(UsageError, match="takes pixels, and normalises them itself; leave --mean and --std out"):
        load(path, mean=0.5, std=0.5)
    model.save(tmp_path / "shifted.onnx", {"remtta_version": "1", "preprocessing": "{}", "labels": "[]"})
    frames = open_stream(draw_folder(tmp_path / "frames", range(16)))
    titles = [finding.candidate.title for finding in examine(model, frames, limit=16, wait=lambda: None).findings]
    assert titles == ["mean, std: none", "mean, std: none; red, blue swapped"]


def test_weights_may_be_in_the_folder_to_which_the_file_is_a_link(tmp_path: Path) -> None:
    """The cache of Hugging Face has links in snapshots/, to files in blobs/ without a suffix."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    proto = onnx.load(write_onnx(tmp_path / "tiny.onnx"))
    onnx.save_model(proto, snapshot / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    for name, blob in (("model.onnx", "aa"), ("data", "bb")):
        (snapshot / name).rename(blobs / blob)
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    model, images = load(snapshot / "model.onnx"), random_images(3)
    torch.testing.assert_close(model(images), expected(images))
    torch.testing.assert_close(model.classify_with_features(images)[0], expected(images))
    model.save(tmp_path / "shifted.onnx", {})
    torch.testing.assert_close(load(tmp_path / "shifted.onnx")(images), expected(images))
    assert Path(str(model_info(model).origin["checkpoint"])) == snapshot / "model.onnx"
    (blobs / "bb").rename(tmp_path / "secret")
    (blobs / "bb").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="'data', which is not in its own folder; it was not opened"):
        load(snapshot / "model.onnx")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda proto: setattr(proto, "ir_version", 99),
            r"IR version: 99, max supported IR version: \d+; update onnxr",
        ),
        (
            lambda proto: setattr(proto.opset_import[0], "version", 99),
            r"Opset 99 is .* opset \d+; update onnxruntime, or",
        ),
        (lambda proto: setattr(proto.graph.node[1], "op_type", "Foo"), r"No Op registered for Foo"),
    ],
)
def test_onnxruntimes_reason_is_shown(tmp_path: Path, change: Callable[[onnx.ModelProto], object], reason: str) -> None:
    folder = tmp_path / ("long " * 40)
    folder.mkdir()
    with pytest.raises(CheckpointError, match=reason) as raised:
        load(write(folder / "tiny.onnx", change=change))
    assert not {"onnxruntime_src", "ONNXRuntimeError"} & set(str(raised.value).replace("/", " ").split())


def test_what_onnxruntime_misses_in_a_run_is_shown(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\(2, 3, 16, 16\): .*index: 2 Got: 16 Expected: 32 index: 3"):
        load(write_onnx(tmp_path / "tiny.onnx"))(torch.zeros(2, 3, 16, 16))


TOP = [node("TopK", ["logits", "k"], ["values", "classes"])]
TRANSPOSED = [node("Transpose", ["logits"], ["out"], perm=[1, 0])]
ROWS_ABOVE_0 = [
    node("Greater", ["logits", "zero"], ["above"]),
    node("Cast", ["above"], ["cast"], to=TensorProto.INT64),
    node("NonZero", ["cast"], ["places"]),
    node("Gather", ["places", "index"], ["rows"]),
    node("Gather", ["logits", "rows"], ["out"]),
]
ONE_BOX = [  # for each image
    node("Slice", ["logits", "zeros", "twos", "ones"], ["scores"]),
    node("Unsqueeze", ["scores", "ones"], ["by_class"]),
    node("NonMaxSuppression", ["boxes", "by_class", "ones"], ["selected"]),
    node("Gather", ["selected", "index"], ["rows"], axis=1),
    node("Gather", ["logits", "rows"], ["out"]),
]
SLICES = {"zeros": [0], "ones": [1], "twos": [2], "index": 0}
BOX = np.array([[[0, 0, 1, 1], [0, 0, 0.5, 0.5]]], np.float32)
NO_LOGITS: dict[str, tuple[Sequence[onnx.NodeProto], dict[str, Any], str]] = {
    "(C, B)": (TRANSPOSED, {}, r"out is \(7, 1\) for 1 image"),
    "(C, B) of four": (TRANSPOSED, {"batch": 4}, r"out is \(7, 4\) for 4 images"),
    "(C, B) of as many": (TRANSPOSED, {"batch": 7}, "out differs among 7 copies of an image"),
    "detections": (ROWS_ABOVE_0, {"tensors": {"zero": np.float32(0), "index": 0}}, r"out is \(\d, 7\) for 1 image"),
    "detections of one": (
        ROWS_ABOVE_0,
        {"tensors": {"zero": np.float32(0), "index": 0}, "batch": 1},
        r"out is \(\d, 7\) for 1 image",
    ),
    "a detection": (ONE_BOX, {"tensors": {**SLICES, "boxes": BOX}, "batch": 1}, "out is selected by NonMaxSuppression"),
    "top values": (TOP, {"tensors": {"k": [5]}}, r"values is selected by TopK; classes is tensor\(int64\)"),
    "top probabilities": (
        [
            node("Softmax", ["logits"], ["probs"]),
            node("TopK", ["probs", "k"], ["top", "_"]),
            node("Log", ["top"], ["out"]),
        ],
        {"tensors": {"k": [5]}},
        "out is selected by TopK",
    ),
    "a constant": ([node("Constant", [], ["out"], value_floats=[1.0])], {}, r"out is \(1,\) for 1 image"),
    "a constant for each image": (
        [node("Shape", ["logits"], ["shape"]), node("Expand", ["fc_bias", "shape"], ["out"])],
        {},
        "out does not depend on the images",
    ),
    "a number beside": ([node("ReduceMax", ["logits"], ["out"], keepdims=0)], {}, r"out is \(\) for 1 image"),
}


@pytest.mark.parametrize("kind", NO_LOGITS)
def test_outputs_that_are_no_row_per_image_are_refused(tmp_path: Path, kind: str) -> None:
    nodes, options, problem = NO_LOGITS[kind]
    with pytest.raises(CheckpointError, match=rf"no output \(B, C\), as a classifier has: {problem}$"):
        load(write(tmp_path / "tiny.onnx", nodes, **options))


def test_logits_beside_other_outputs_are_found(tmp_path: Path) -> None:
    path, images = tmp_path / "tiny.onnx", random_images(5)
    write(path, [*TOP, node("ReduceMax", ["logits"], ["max"], keepdims=0)], {"k": [5]}, ["max", "values", "logits"])
    torch.testing.assert_close(load(path)(images), expected(images))


def test_rows_that_vary_in_a_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    monkeypatch.setattr(OnnxClassifier, "_call", lambda *_: [np.zeros((1, NUM_CLASSES), np.float32)])
    with pytest.raises(CheckpointError, match=r"returned \(1, 7\) for 4 images, not logits of 7 classes"):
        model(random_images(5))


CLIP = [node("Sigmoid", ["logits"], ["sigmoid"]), node("Clip", ["sigmoid", "low", "high"], ["out"])]
LIMITS = {"low": np.float32(1e-7), "high": np.float32(1)}
FORMULA = [
    node("Neg", ["logits"], ["minus"]),
    node("Exp", ["minus"], ["exp"]),
    node("Add", ["exp", "one"], ["sum"]),
    node("Div", ["one", "sum"], ["out"]),
]
PERCENT = [node("Softmax", ["logits"], ["probs"]), node("Mul", ["probs", "hundred"], ["out"])]
DOUBTED: dict[str, tuple[Sequence[onnx.NodeProto], dict[str, Any], str]] = {
    "a clipped sigmoid": (CLIP, LIMITS, "values in [0, 1], as a sigmoid does"),
    "a sigmoid by formula": (FORMULA, {"one": np.float32(1)}, "values in [0, 1], as a sigmoid does"),
    "percent": (
        PERCENT,
        {"hundred": np.float32(100)},
        "values that sum to 100 for each image, as scaled probabilities",
    ),
    "a softmax over the batch": ([node("Softmax", ["logits"], ["out"], axis=0)], {}, "values in [0, 1]"),
    "logits": ([], {}, ""),
    "log-probabilities": ([node("LogSoftmax", ["logits"], ["out"])], {}, ""),
    "centered logits": (
        [node("ReduceMean", ["logits"], ["m"], axes=[1]), node("Sub", ["logits", "m"], ["out"])],
        {},
        "",
    ),
    "a clipped softmax": ([node("Softmax", ["logits"], ["sigmoid"]), CLIP[1]], LIMITS, ""),
}


@pytest.mark.parametrize("kind", DOUBTED)
def test_values_that_look_like_no_logits_are_doubted(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, tensors, doubt = DOUBTED[kind]
    with caplog.at_level(logging.WARNING):
        load(write(tmp_path / "tiny.onnx", nodes, tensors))
    assert (f"tiny.onnx returns {doubt}" in caplog.text) if doubt else not caplog.records


def quantised(operator: str) -> list[onnx.NodeProto]:
    """Return the end of a file in the QOperator format."""
    options: dict[str, Any] = {"axis": 1, "opset": 17} if operator == "QLinearSoftmax" else {}
    scales = ["scale", "zero", "step", "none"]
    return [
        node("QuantizeLinear", ["logits", "scale", "zero"], ["q"]),
        node(operator, ["q", *scales], ["q_out"], domain="com.microsoft", **options),
        node("DequantizeLinear", ["q_out", "step", "none"], ["out"]),
    ]


def test_a_quantised_softmax_or_sigmoid_is_known_as_one(tmp_path: Path) -> None:
    tensors = {"scale": np.float32(0.1), "zero": np.uint8(128), "step": np.float32(1 / 256), "none": np.uint8(0)}
    path, images = tmp_path / "tiny.onnx", 3 * random_images(8)

    def change(proto: onnx.ModelProto) -> None:
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    model = load(write(path, quantised("QLinearSoftmax"), tensors, change=change))
    torch.testing.assert_close(model(images).softmax(-1), expected(images).softmax(-1), atol=0.03, rtol=0)
    assert model.returns_probabilities
    model.head["bias"].data += torch.linspace(-2, 2, NUM_CLASSES)  # of which some are 0 in the file
    model.save(tmp_path / "shifted.onnx", {})
    shifted = load(tmp_path / "shifted.onnx")
    torch.testing.assert_close(shifted(images).softmax(-1), model(images).softmax(-1), atol=1e-3, rtol=0)
    with pytest.raises(CheckpointError, match="ends in a sigmoid"):
        load(write(path, quantised("QLinearSigmoid"), tensors, change=change))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("batch", ["B", 4])
def test_values_that_are_not_finite_are_left_to_the_run(tmp_path: Path, batch: str | int) -> None:
    nodes = [node("Div", ["logits", "zero"], ["out"])]
    model = load(write(tmp_path / "tiny.onnx", nodes, {"zero": np.float32(0)}, batch=batch))
    assert not model(random_images(5)).isfinite().any() and not model.doubt


@pytest.mark.parametrize("beta", [0.5, 0.0, -2.0])
def test_a_bias_with_a_factor_is_shifted_by_what_was_learned(tmp_path: Path, beta: float) -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node[4].attribute.append(helper.make_attribute("beta", beta))

    model, images = load(write(tmp_path / "tiny.onnx", change=change)), random_images(5)
    model.head["bias"].data += torch.linspace(-1, 1, NUM_CLASSES)
    model.save(tmp_path / "shifted.onnx", {})
    torch.testing.assert_close(load(tmp_path / "shifted.onnx")(images), model(images))


def remttas(labels: object = (), size: object = (SIDE, SIDE)) -> dict[str, str]:
    preprocessing = json.dumps({"input_size": size})
    return {"remtta_version": "1", "preprocessing": preprocessing, "labels": json.dumps(labels)}


def ultralytics(names: str, size: str = "[32, 32]") -> dict[str, str]:
    return {"task": "classify", "names": names, "imgsz": size}


NAMES = str(dict(enumerate("abcdefg")))
MANY = [f"class {number}" for number in range(200_000)]
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "as many names of Ultralytics": (
        {"metadata": ultralytics(str(dict(enumerate(MANY))))},
        "4,577,780 characters of class names",
    ),
    "deep names": ({"metadata": ultralytics("{0:" + "-" * 50_000 + "1}")}, "damaged metadata"),
    "names without number 0": ({"metadata": ultralytics("{1: 'a'}")}, "damaged metadata"),
    "too few names": ({"metadata": ultralytics("{0: 'a'}")}, "damaged metadata: 1 names of 7 classes"),
    "as many labels": ({"metadata": remttas(MANY)}, "damaged metadata: 200000 names of 7 classes"),
    "no labels": ({"metadata": remttas(5)}, "damaged metadata: labels 5"),
    "a word": ({"metadata": remttas("abcdefg")}, "damaged metadata: labels 'abcdefg'"),
    "a size of a million": ({"metadata": remttas(size=(10**6, 10**6)), "side": "S"}, "images of 1000000 x 1000000"),
    "a size beyond 64 bits": ({"metadata": remttas(size=(10**30, 1)), "side": "S"}, "images of 10+ x 1;"),
    "a size of a fixed input": (
        {"metadata": remttas(size=(64, 64))},
        r"images of \(64, 64\) pixels, and it takes \(32",
    ),
    "a size of letters": ({"metadata": ultralytics(NAMES, "['a', 1]"), "side": "S"}, "input_size needs"),
    "a large input": ({"side": 12_000}, "takes images of 12000 x 12000, and remtta at most 33,554,432 pixels at once"),
    "a large batch": ({"batch": 10**9}, "takes 1000000000 images of 32 x 32, and remtta at most"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_absurd_numbers_and_names_are_refused(tmp_path: Path, kind: str) -> None:
    options, problem = DAMAGED[kind]
    with pytest.raises(RemttaError, match=problem) as raised:
        load(write_onnx(tmp_path / "tiny.onnx", **options))
    assert type(raised.value) is CheckpointError and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["images", "logits", "place"])
def test_names_that_are_not_utf8_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "tiny.onnx", change=move_weights(name) if name == "place" else bool)
    path.write_bytes(path.read_bytes().replace(name.encode(), b"\xff" + name[1:].encode()))
    with pytest.raises(CheckpointError, match=r"names are not UTF-8|has its weights in '\ufffdlace', which is missing"):
        load(path)


def test_metadata_that_is_not_utf8_is_kept_as_far_as_it_can_be(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", metadata={"key": "of a stranger"})
    path.write_bytes(path.read_bytes().replace(b"of a stranger", b"of \xff stranger"))
    load(path).save(tmp_path / "shifted.onnx", {})
    stored = onnx.load(tmp_path / "shifted.onnx").metadata_props
    assert {entry.key: entry.value for entry in stored} == {"key": "of � stranger"}


def test_labels_of_the_user_replace_wrong_ones(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", metadata=remttas(["a"]))
    assert model_info(load(path, labels=[*"abcdefg"])).labels == [*"abcdefg"]
    assert model_info(load(write_onnx(path, metadata={"task": "image-classification"}))).guessed
    write_onnx(path, metadata=ultralytics(NAMES), side="S")
    assert model_info(load(path)).preprocessing.input_size == (SIDE, SIDE)


@pytest.mark.parametrize("place", ["a\0b", "a" * 5000, "", "."])
def test_a_place_of_weights_that_is_no_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(CheckpointError, match=r"(refers to|has its weights in) '.{0,85}', which is (not|missing)"):
        load(write(tmp_path / "tiny.onnx", change=move_weights(place)))
