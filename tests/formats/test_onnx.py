"""ONNX files predict as torch does, whatever their form; what is no classifier is refused."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from remtta import Adapter, load_model
from remtta.errors import CheckpointError, RemttaError, UsageError
from remtta.formats.onnx_model import OnnxClassifier
from remtta.methods.build import build_method
from remtta.models.info import model_info
from remtta.models.preprocessing import preprocessing_of
from tests.conftest import raising, random_images
from tests.formats.tiny_onnx import NUM_CLASSES, PATCH, tiny_network, write_onnx

FORMS: dict[str, dict[str, Any]] = {
    "bias": {},
    "no bias": {"end": "MatMul"},
    "channels last": {"channels_last": True},
    "one at a time": {"batch": 1},
    "four at a time": {"batch": 4},
    "any size": {"side": "S"},
    "softmax": {"end": "Softmax"},
    "softmax, by its values": {"end": "exp"},
    "float16": {"kind": TensorProto.FLOAT16},
    "quantised": {"end": "quantised Gemm"},
    "quantised softmax": {"end": "quantised Softmax"},
    "two outputs": {"end": "two"},
}


def load(path: Path, **options: Any) -> OnnxClassifier:
    model = load_model(str(path), **options)
    assert isinstance(model, OnnxClassifier)
    return model


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> OnnxClassifier:
    """A file of each form."""
    path = write_onnx(tmp_path / "tiny.onnx", **FORMS[request.param])
    return load(path, output_name="logits" if "two" in request.param else None)


def expected_probs(form: OnnxClassifier, images: torch.Tensor) -> torch.Tensor:
    network = tiny_network()
    if "MatMul" in {node.op_type for node in onnx.load(form.path).graph.node}:
        torch.nn.init.zeros_(network[-1].bias)  # type: ignore[index]
    with torch.no_grad():
        return network(images).softmax(-1)


def test_every_form_predicts_as_torch_does(form: OnnxClassifier) -> None:
    images = random_images(9)
    torch.testing.assert_close(form(images).softmax(-1), expected_probs(form, images), atol=form.tolerance, rtol=0)
    assert form.num_classes == NUM_CLASSES and form.patch_size == (PATCH, PATCH)
    assert form.provider == "CPUExecutionProvider"


def test_every_form_is_written_with_shifted_logits(form: OnnxClassifier, tmp_path: Path) -> None:
    shift, images = torch.linspace(-1, 1, NUM_CLASSES), random_images(5)
    before = form(images)
    form.head["bias"].data += shift
    form.save(tmp_path / "shifted.onnx", {"frames": "12"})
    written = load(tmp_path / "shifted.onnx", output_name=form.output_name)
    difference = (written(images).softmax(-1) - (before + shift).softmax(-1)).abs().max()
    assert difference <= form.tolerance and not torch.equal(before, written(images))
    assert {entry.key: entry.value for entry in onnx.load(written.path).metadata_props} == {"frames": "12"}


def test_a_bias_takes_the_shift_where_there_is_one(tmp_path: Path) -> None:
    counts = {}
    for end in ("Gemm", "Softmax", "MatMul", "quantised Gemm", "exp"):
        model = load(write_onnx(tmp_path / "tiny.onnx", end=end))
        model.head["bias"].data += torch.linspace(-1, 1, NUM_CLASSES)
        model.save(tmp_path / "shifted.onnx", {})
        counts[end] = len(onnx.load(tmp_path / "shifted.onnx").graph.node) - len(onnx.load(model.path).graph.node)
    assert counts == {"Gemm": 0, "Softmax": 0, "MatMul": 1, "quantised Gemm": 1, "exp": 4}


def test_a_file_that_predicts_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    model.head["bias"].data += torch.linspace(-9, 9, NUM_CLASSES)
    monkeypatch.setattr("remtta.formats.onnx_graph.OnnxGraph._shift_bias", lambda *_: True)
    with pytest.raises(RemttaError, match="predicts otherwise"):
        model.save(tmp_path / "shifted.onnx", {})
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


def test_fast_predicts_and_adapts_as_with_torch(tmp_path: Path) -> None:
    there = Adapter(str(write_onnx(tmp_path / "tiny.onnx")))
    here = Adapter(tiny_network(), "fast", patch_size=(PATCH, PATCH))
    for seed in range(6):
        images = random_images(20, seed) + 0.5
        torch.testing.assert_close(there(images), here(images), atol=1e-4, rtol=0)
    torch.testing.assert_close(there.delta()["head.bias"], here.delta()["4.bias"], atol=1e-3, rtol=0)


def test_lame_finds_the_features_of_the_last_layer(tmp_path: Path) -> None:
    images = random_images(12)
    for end in ("Gemm", "MatMul", "Softmax", "two"):
        model = load(write_onnx(tmp_path / "tiny.onnx", end=end), output_name="logits" if end == "two" else None)
        logits, features = model.classify_with_features(images)
        torch.testing.assert_close(features, tiny_network()[:-1](images).detach())  # type: ignore[index]
        torch.testing.assert_close(logits, model(images))
    assert Adapter(model, "lame")(images).shape == (12, NUM_CLASSES)


@pytest.mark.parametrize("method", ["tent", "remtta", "foa", "cotta", "supervised"])
def test_methods_that_need_gradients_are_refused(tmp_path: Path, method: str) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    with pytest.raises(
        UsageError, match=r"forward passes only, and this method needs .*; use the method fast, center, source or lame"
    ):
        build_method(method, model)


def test_a_copy_opens_the_file_again_unless_it_has_changed(tmp_path: Path) -> None:
    model, images = load(write_onnx(tmp_path / "tiny.onnx")), random_images(3)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(images), model(images))
    again = copy.deepcopy(model)
    write_onnx(tmp_path / "tiny.onnx", end="MatMul")
    with pytest.raises(CheckpointError, match="no longer the file"):
        again(images)


def test_preprocessing_and_labels_are_those_of_the_file_then_of_options(tmp_path: Path) -> None:
    known = {"input_size": [32, 32], "mean": [0.1] * 3, "std": [0.2] * 3, "interpolation": "bilinear", "crop_pct": 0.9}
    labels = [f"class {number}" for number in range(NUM_CLASSES)]
    ours = {"remtta_version": "1", "preprocessing": json.dumps(known), "labels": json.dumps(labels)}
    theirs = {"task": "classify", "names": str(dict(enumerate(labels))), "imgsz": "[32, 32]"}
    path = tmp_path / "tiny.onnx"
    imagenets = "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 --interpolation bicubic --crop-pct 0.875"
    for metadata, mean, guessed in ((ours, 0.1, ""), (theirs, 0.0, ""), ({}, 0.485, imagenets)):
        model = load(write_onnx(path, side="S", metadata=metadata), input_size=32)
        info = model_info(model)
        assert info.preprocessing.mean[0] == mean and info.guessed == guessed
        assert info.labels == (labels if metadata else None)
    assert preprocessing_of(load(write_onnx(path, side="S"))).input_size == (224, 224)
    given = model_info(load(write_onnx(path, metadata=ours), mean=0.5, std=0.5, labels=list("abcdefg")))
    assert (given.preprocessing.mean[0], given.preprocessing.interpolation, given.labels) == (
        0.5,
        "bilinear",
        [*"abcdefg"],
    )


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[RemttaError], str]] = [
    (
        {"end": "detector"},
        {},
        CheckpointError,
        r"no output \(B, C\), as a classifier has: boxes is \(1, 1, 7\) for 1 image",
    ),
    ({"end": "Sigmoid"}, {}, CheckpointError, "sigmoid"),
    ({"end": "two"}, {}, UsageError, "choose with --output-name: logits, features"),
    ({}, {"output_name": "scores"}, UsageError, "has no output scores; choose logits"),
    ({}, {"input_size": 64}, UsageError, "32 x 32 only; leave --input-size out"),
    ({}, {"num_classes": 3}, UsageError, "whole model; leave --num-classes out"),
    ({}, {"labels": ["a"]}, UsageError, "got 1 label for a model with 7 classes"),
    ({}, {"provider": "openvino"}, UsageError, "onnxruntime has no provider openvino here; it has .*cpu"),
    ({}, {"device": "cuda"}, UsageError, "onnxruntime has no provider CUDA here"),
    ({"metadata": {"task": "detect"}}, {}, CheckpointError, "a model to detect"),
    ({"metadata": {"remtta_version": "1", "preprocessing": "[]"}}, {}, CheckpointError, "damaged metadata"),
]


@pytest.mark.parametrize(("form", "options", "error", "text"), REFUSED)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, form: dict[str, Any], options: dict[str, Any], error: type[RemttaError], text: str
) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", **form)
    with pytest.raises(error, match=text) as raised:
        load(path, **options)
    assert "\n" not in str(raised.value)


def test_damaged_files_and_other_inputs_are_refused(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "tiny.onnx")
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"no model", content[:-40]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load(path)
    proto = onnx.load_model_from_string(content)
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(proto, path)
    with pytest.raises(CheckpointError):
        load(path)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("scale", TensorProto.FLOAT, [2]))
    onnx.save(proto, path)
    with pytest.raises(CheckpointError, match="scale tensor\\(float\\) \\[2\\], not images"):
        load(path)


def test_weights_in_another_file_come_only_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_onnx(folder / "tiny.onnx")
    plain, proto, images = load(path), onnx.load(path), random_images(2)
    logits = plain(images)
    onnx.save_model(proto, path, save_as_external_data=True, location="tiny.data", size_threshold=0)
    assert torch.equal(load(path)(images), logits)
    data = folder / "tiny.data"
    first = model_info(load(path)).sha256
    values = np.frombuffer(data.read_bytes(), np.float32) * 2
    data.write_bytes(values.tobytes())
    assert model_info(load(path)).sha256 != first
    outside = tmp_path / "secret.data"
    data.rename(outside)
    with pytest.raises(CheckpointError, match="missing; copy it beside the file"):
        load(path)
    data.symlink_to(outside)
    with pytest.raises(CheckpointError, match="not in its own folder"):
        load(path)
    for place in ("../secret.data", str(outside)):
        proto = onnx.load(path, load_external_data=False)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                entry.value = place if entry.key == "location" else entry.value
        onnx.save(proto, path)
        with pytest.raises(CheckpointError, match="not in its own folder; it was not opened"):
            load(path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_onnx(tmp_path / "tiny.onnx")
    monkeypatch.setattr("importlib.import_module", raising(ImportError("no")))
    with pytest.raises(UsageError, match=r'onnxruntime, which is not installed: pip install .*"onnxruntime'):
        load(path)


def test_preprocessing_and_labels_that_optimum_wrote_beside_the_file(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "model.onnx", side="S")
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    processor = {"image_processor_type": "ViTImageProcessor", "image_mean": mean, "image_std": std, "size": 24}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    labels = [f"sign {number}" for number in range(NUM_CLASSES)]
    config = {"model_type": "vit", "id2label": {str(number): label for number, label in enumerate(labels)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = model_info(load(path))
    assert info.preprocessing.input_size == (24, 24)
    assert (info.preprocessing.mean, info.preprocessing.std) == (mean, std)
    assert info.labels == labels


def test_unusable_preprocessing_beside_the_file_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_onnx(tmp_path / "model.onnx")
    (tmp_path / "preprocessor_config.json").write_text("{")
    assert model_info(load(path, mean=(0.5,) * 3)).preprocessing.mean == (0.5,) * 3
    assert "preprocessor_config.json is not a readable preprocessing config" in caplog.text
