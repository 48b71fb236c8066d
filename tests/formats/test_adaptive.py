"""A file that adapts itself predicts what the method `fast` predicts with the classifier that it was made of."""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType, quantize_static
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from remtta import Adapter, Delta, apply_delta, load_delta
from remtta.errors import CheckpointError, RemttaError
from remtta.formats.adaptive.writing import write_adaptive
from remtta.formats.export import ExportableModel, save_adaptive, save_onnx
from remtta.formats.onnx_model import OnnxClassifier
from remtta.methods.build import tell_once
from remtta.models.info import model_info
from remtta.models.metadata import ModelWithMetadata
from remtta.models.preprocessing import Preprocessing
from remtta.pipeline.build import AdaptationConfig, build_pipeline
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.temperature import TemperatureScaling
from tests.command import refusal_of, remtta_here
from tests.conftest import NUM_CLASSES, TINY, draw_folder, raising, random_images, tiny_vit
from tests.formats.test_export import delta_at
from tests.formats.test_onnx import FORMS, load
from tests.formats.tiny_onnx import write_onnx
from tests.records import rows_of

NAN = float("nan")
EXAMPLES = Path(__file__).parents[2] / "examples" / "device"


class Device:
    """The loop on a device: a session, and the state."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path))
        self.images, state = self.session.get_inputs()
        self.returns_probabilities = self.session.get_outputs()[0].name == "probabilities"
        self.state, self.status = np.zeros(state.shape, np.float32), np.zeros(0)

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities of images (B, 3, H, W)."""
        given = images.permute(0, 2, 3, 1) if self.images.shape[-1] == 3 else images
        kind = np.float16 if self.images.type == "tensor(float16)" else np.float32
        returned, self.state, self.status = self.session.run(
            None, {"images": given.numpy().astype(kind), "state": self.state}
        )
        probabilities = torch.from_numpy(returned)
        return probabilities if self.returns_probabilities else probabilities.softmax(-1)


def adaptive(model: OnnxClassifier, path: Path) -> Device:
    write_adaptive(model, path, {})
    return Device(path)


def fast(model: Any) -> Pipeline:
    return Adapter(model, "fast").pipeline


def stream(size: int, side: int = 32) -> list[Tensor]:
    """Batches of a stream of one class, then of many under a shift."""
    count = 80 // size
    one = [3 * random_images(1, 99, side) + 0.1 * random_images(size, number, side) for number in range(count)]
    return [*one, *(random_images(size, 50 + number, side) + 0.5 for number in range(count))]


def check_equal(device: Device, pipeline: Pipeline, batches: list[Tensor], tolerance: float = 1e-4) -> list[float]:
    """Compare all predictions, and the status; return the fractions of classes kept."""
    scaling, fractions = pipeline.find(TemperatureScaling), []
    assert scaling is not None
    for images in batches:
        expected_temperature = scaling.temperature
        expected, got = pipeline(images).softmax(-1), device(images)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0, equal_nan=True)
        sure = expected.topk(2).values @ torch.tensor([1.0, -1.0]) > 2 * tolerance
        assert torch.equal(got.argmax(-1)[sure], expected.argmax(-1)[sure])
        norm, fraction, temperature, _, _ = device.status
        assert norm == pytest.approx(float(pipeline.centering.offsets["adapted"].norm()), abs=50 * tolerance)
        assert fraction == pytest.approx(float(pipeline.centering.class_fraction_kept), abs=50 * tolerance)
        assert temperature == pytest.approx(expected_temperature, abs=10 * tolerance)
        fractions.append(float(fraction))
    return fractions


def fused(path: Path) -> list[str]:
    """Return the operators that onnxruntime makes of a file's."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_name("optimised.onnx"))
    onnxruntime.InferenceSession(path, options)
    return [node.op_type for node in onnx.load(path.with_name("optimised.onnx")).graph.node]


def with_float_output(path: Path) -> Path:
    proto = onnx.load(path)
    proto.graph.node.append(helper.make_node("Cast", ["logits"], ["float"], to=TensorProto.FLOAT))
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("float", TensorProto.FLOAT, ["B", 7]))
    onnx.save(proto, path)
    return path


EVERY_SIZE = ("bias", "softmax", "float16")


@pytest.mark.parametrize(
    ("form", "size"), [(form, size) for form in FORMS for size in (1, 4, 20) if form in EVERY_SIZE or size == 4]
)
def test_it_predicts_as_fast_does(tmp_path: Path, form: str, size: int) -> None:
    size = FORMS[form].get("batch", size)
    path = write_onnx(tmp_path / "tiny.onnx", pooled=False, **FORMS[form])
    model = load(path, output_name="logits" if form == "two outputs" else None, input_size=32)
    device = adaptive(model, tmp_path / "adaptive.onnx")
    if form == "float16":  # the file centers logits before onnxruntime rounds them
        model = load(with_float_output(path))
    fractions = check_equal(device, fast(model), stream(size))
    assert max(fractions) > 0


def test_images_of_any_size_have_the_same_views(tmp_path: Path) -> None:
    for side in (32, 38):  # four patches of 8, and of 9 after resizing
        model = load(write_onnx(tmp_path / "tiny.onnx", side=side, pooled=False, channels_last=side == 38))
        check_equal(adaptive(model, tmp_path / "adaptive.onnx"), fast(model), stream(20, side=side))


def taking_pixels(path: Path) -> Path:
    proto = onnx.load(path)
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    proto.graph.node[0].input[0] = "values"
    proto.graph.node.insert(0, helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT))
    proto.graph.node.insert(1, helper.make_node("Div", ["pixels", "deviation"], ["values"]))
    proto.graph.initializer.append(helper.make_tensor("deviation", TensorProto.FLOAT, [], [60.0]))
    onnx.save(proto, path)
    return path


def test_a_file_that_takes_pixels_gets_shuffled_pixels(tmp_path: Path) -> None:
    model = load(taking_pixels(write_onnx(tmp_path / "tiny.onnx", side=38, pooled=False)))  # resizes and rounds views
    device, pipeline = adaptive(model, tmp_path / "adaptive.onnx"), fast(model)
    for images in stream(4, side=38):
        pixels = (255 * images.sigmoid()).to(torch.uint8)
        returned, device.state, device.status = device.session.run(
            None, {"images": pixels.numpy(), "state": device.state}
        )
        expected = pipeline(pixels / 255).softmax(-1)
        torch.testing.assert_close(torch.from_numpy(returned).softmax(-1), expected, atol=1e-4, rtol=0)


def test_a_dynamically_quantised_file_may_round_otherwise(tmp_path: Path) -> None:
    """Its scale is that of all rows of a batch: with views, one of more images."""
    path = write_onnx(tmp_path / "tiny.onnx", pooled=False)
    proto = onnx.load(path)
    nodes = proto.graph.node
    nodes[-1].input[0] = "rounded"
    nodes.insert(len(nodes) - 1, helper.make_node("DynamicQuantizeLinear", ["features"], ["q", "scale", "zero"]))
    nodes.insert(len(nodes) - 1, helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["rounded"]))
    onnx.save(proto, path)
    model = load(path)
    with pytest.raises(AssertionError, match=r"not close|comparison failed"):
        check_equal(adaptive(model, tmp_path / "adaptive.onnx"), fast(model), stream(4))
    check_equal(adaptive(model, tmp_path / "adaptive.onnx"), fast(model), stream(4), 0.1)


def test_images_that_are_not_finite_change_nothing(tmp_path: Path) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    device, pipeline = adaptive(model, tmp_path / "adaptive.onnx"), fast(model)
    device(torch.full((2, 3, 32, 32), NAN))
    assert not device.state.any()
    batches = stream(5)
    batches[0][0, 0, 0, 0] = batches[1][4, 2, 3, 4] = NAN
    batches[2][1:4] = float("inf")
    check_equal(device, pipeline, batches)
    assert device.status[-1] == 5 * len(batches) - 5
    state = device.state
    assert device(torch.full((3, 3, 32, 32), NAN)).isnan().all()
    assert state.tobytes() == device.state.tobytes()


def test_an_int8_file_that_hides_nan_is_not_misled(tmp_path: Path) -> None:
    device = adaptive(load(write_onnx(tmp_path / "tiny.onnx", end="quantised Gemm")), tmp_path / "adaptive.onnx")
    device(random_images(3))
    state = device.state
    assert not device(torch.full((1, 3, 32, 32), NAN)).isnan().any()
    assert state.tobytes() == device.state.tobytes()


def test_a_stored_state_continues_exactly(tmp_path: Path) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    device, batches = adaptive(model, tmp_path / "adaptive.onnx"), stream(4)
    for images in batches[:10]:
        device(images)
    np.save(tmp_path / "state.npy", device.state)
    expected = [device(images) for images in batches[10:]]
    again = Device(tmp_path / "adaptive.onnx")
    again.state = np.load(tmp_path / "state.npy")
    assert all(torch.equal(again(images), each) for images, each in zip(batches[10:], expected, strict=True))


def test_a_state_of_another_model_begins_anew_and_one_of_another_length_is_refused(tmp_path: Path) -> None:
    device = adaptive(load(write_onnx(tmp_path / "tiny.onnx")), tmp_path / "adaptive.onnx")
    other = adaptive(load(write_onnx(tmp_path / "other.onnx", end="MatMul")), tmp_path / "adaptive2.onnx")
    images = random_images(3)
    expected = other(images)
    device(images)
    other.state = device.state
    assert torch.equal(other(random_images(3)), expected) and other.status[-1] == 3
    other.state = other.state[:-1]
    with pytest.raises(Exception, match="invalid dimensions"):
        other(images)


def test_the_file_has_standard_operators_only_and_its_facts(tmp_path: Path) -> None:
    for batch in ("B", 4):
        path = write_onnx(tmp_path / "tiny.onnx", batch=batch)
        write_adaptive(load(path), tmp_path / "adaptive.onnx", {"frames": "1"})
        onnx.checker.check_model(tmp_path / "adaptive.onnx", full_check=True)
        written = onnx.load(tmp_path / "adaptive.onnx")
        assert [(each.domain, each.version) for each in written.opset_import] == [("", 17)]
        assert [each.name for each in written.graph.output] == ["logits", "next_state", "status"]
        assert {entry.key: entry.value for entry in written.metadata_props} == {"frames": "1", "patch_size": "[8, 8]"}


def test_an_older_opset_is_raised(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "tiny.onnx")
    proto = onnx.load(path)
    proto.opset_import[0].version = 12
    onnx.save(proto, path)
    model = load(path)
    check_equal(adaptive(model, tmp_path / "adaptive.onnx"), fast(model), stream(4))
    proto.graph.node[1].op_type = "Relu6"  # of no opset, and not run
    from remtta.formats.adaptive.wrapping import _with_opset

    with pytest.raises(CheckpointError, match="opset 12 cannot be converted to 17"):
        _with_opset(proto)


@pytest.mark.filterwarnings("ignore")  # what torch's exporter warns of
def test_a_runtime_fuses_nodes_as_in_the_classifier(tmp_path: Path) -> None:
    save_onnx(exportable(tiny_vit()), tmp_path / "plain.onnx")
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "plain.onnx")), tmp_path / "shapes.onnx")
    adaptive(load(tmp_path / "shapes.onnx"), tmp_path / "a.onnx")
    for operator, count in (("SkipLayerNormalization", 1), ("LayerNormalization", 4), ("BiasGelu", 2)):
        assert [fused(tmp_path / name).count(operator) for name in ("shapes.onnx", "a.onnx")] == [count, count]


def test_subgraphs_keep_what_they_read_of_the_graph_around_them(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "tiny.onnx")
    proto = onnx.load(path)
    conv = proto.graph.node[0]
    conv.output[0] = "branch"
    shape = [helper.make_tensor_value_info("branch", TensorProto.FLOAT, ["B", 12, 4, 4])]
    branches = {f"{name}_branch": helper.make_graph([conv], name, [], shape) for name in ("then", "else")}
    proto.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    proto.graph.node[0].CopyFrom(helper.make_node("If", ["yes"], ["map"], **branches))
    onnx.save(proto, path)
    model = load(path)
    check_equal(adaptive(model, tmp_path / "adaptive.onnx"), fast(model), stream(4))


def test_a_file_that_predicts_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    monkeypatch.setattr("remtta.formats.adaptive.centering.HALF_LIFE", 20)
    with pytest.raises(RemttaError, match="predicts otherwise than fast"):
        write_adaptive(model, tmp_path / "adaptive.onnx", {})
    monkeypatch.setattr("onnxruntime.InferenceSession", raising(RuntimeError("no such operator")))
    with pytest.raises(RemttaError, match="cannot load the file with the adaptation: no such operator"):
        write_adaptive(model, tmp_path / "adaptive.onnx", {})
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


def test_the_command_writes_files_that_no_command_adapts_again(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = load(write_onnx(tmp_path / "tiny.onnx"))
    Path("labels.txt").write_text("\n".join("abcdefg"))
    options = ["--adaptive", "-o", "adaptive.onnx", "--labels", "labels.txt", "--mean", "0.5", "--std", "0.25"]
    assert remtta_here("export", "tiny.onnx", *options) == 0
    device = Device(tmp_path / "adaptive.onnx")
    check_equal(device, fast(model), stream(4))
    facts = device.session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["labels"]) == list("abcdefg") and json.loads(facts["preprocessing"])["mean"] == [0.5] * 3
    assert json.loads(facts["adaptive"])[-1] == "images" and facts["model"] == "tiny.onnx"
    for args in (["adapt", frames], ["bench"]):
        line = refusal_of(capfd, *args, "--model", "adaptive.onnx", code=4)
        assert line.endswith("adaptive.onnx adapts itself: run it as it is, or name the file that it was made of")
    line = refusal_of(capfd, "export", "adaptive.onnx", "--adaptive", "-o", "twice.onnx", code=4)
    assert "adapts itself" in line and not Path("twice.onnx").exists()


DOCTOR_FORMS: dict[str, dict[str, Any]] = {
    "bias": {},
    "softmax": {"end": "Softmax"},
    "fixed": {"batch": 3},
    "one": {"batch": 1},
}


@pytest.mark.parametrize("form", DOCTOR_FORMS)
def test_doctor_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", pooled=False, **DOCTOR_FORMS[form])
    assert remtta_here("export", path, "--adaptive", "-o", tmp_path / "adaptive.onnx", "--mean", "0.5") == 0
    args: list[str | Path] = [
        "doctor",
        draw_folder(tmp_path / "frames", range(20)),
        "--model",
        tmp_path / "adaptive.onnx",
    ]
    capsys.readouterr()
    assert remtta_here(*args, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    size = 3 if form == "fixed" else 1
    assert found["works"] and found["images"] == 20 and found["images_seen"] == -(-20 // size) * size
    assert found["state_keeps_its_size"] and found["state_numbers"] == 4 * 7 + 15
    assert found["predictions_are_finite"] and found["stored_state_continues_exactly"] and found["nan_leaves_state"]
    assert found.get("predicts_as_fast") == (None if form == "fixed" else True)
    assert found["offset_norm"] > 1 and 0 < found["agreement"] < 1 and found["temperature"] != 1
    assert remtta_here(*args) == 0
    page = capsys.readouterr().out
    assert "nan leaves state                yes" in page
    verdict = "It does what it should. Its preprocessing was not checked: run doctor on the original model."
    assert page.endswith(f"\n{verdict}\n")


BRIGHTNESS = helper.make_node("ReduceMean", ["images"], ["fault"], keepdims=0)
RANDOM = helper.make_node("RandomUniform", [], ["fault"], shape=[7])
SLOPE = helper.make_node("Constant", [], ["fault"], value_floats=list(map(float, range(7))))
INFINITE = helper.make_node("Constant", [], ["fault"], value_float=float("inf"))


def add_fault(path: Path, output: str, fault: onnx.NodeProto) -> None:
    proto = onnx.load(path)
    next(node for node in proto.graph.node if output in node.output).output[0] = "right"
    proto.graph.node.extend([fault, helper.make_node("Add", ["right", "fault"], [output])])
    onnx.save(proto, path)


@pytest.mark.parametrize(
    ("output", "fault", "failed"),
    [
        ("next_state", BRIGHTNESS, {"nan_leaves_state", "images_are_counted", "predicts_as_fast"}),
        ("status", BRIGHTNESS, {"images_are_counted"}),
        ("logits", SLOPE, {"predicts_as_fast"}),
        ("logits", RANDOM, {"predicts_as_fast", "stored_state_continues_exactly"}),
        ("logits", INFINITE, {"predicts_as_fast", "predictions_are_finite"}),
    ],
)
def test_doctor_finds_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, fault: onnx.NodeProto, failed: set[str]
) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", pooled=False)
    assert remtta_here("export", path, "--adaptive", "-o", tmp_path / "adaptive.onnx", "--mean", "0.5") == 0
    add_fault(tmp_path / "adaptive.onnx", output, fault)
    folder = draw_folder(tmp_path / "frames", range(20))
    capsys.readouterr()
    assert remtta_here("doctor", folder, "--model", tmp_path / "adaptive.onnx", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["works"] and {name for name, value in found.items() if value is False} == {"works", *failed}


def test_doctor_refuses_what_no_export_writes(frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_adaptive(load(write_onnx(tmp_path / "tiny.onnx")), tmp_path / "a.onnx", {"adaptive": "[]"})
    proto = onnx.load(tmp_path / "a.onnx")
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "S"
    onnx.save(proto, tmp_path / "free.onnx")
    line = refusal_of(capfd, "doctor", frames, "--model", tmp_path / "free.onnx", code=4)
    names = "images, state, logits, next_state, status"
    assert line.endswith(f"has no state of fixed length among its inputs and outputs {names}; export it again")
    plain = write_onnx(tmp_path / "plain.onnx", metadata={"adaptive": "[]"})
    line = refusal_of(capfd, "doctor", frames, "--model", plain, code=4)
    assert line.endswith("inputs and outputs images, logits; export it again")
    for value in ("", "[8]", "[8, null]"):
        helper.set_model_props(proto := onnx.load(tmp_path / "a.onnx"), {"adaptive": "[]", "patch_size": value})
        onnx.save(proto, tmp_path / "size.onnx")
        line = refusal_of(capfd, "doctor", frames, "--model", tmp_path / "size.onnx", code=4)
        assert line.endswith("has no valid patch_size in its metadata; export it again")


@pytest.mark.filterwarnings("ignore")  # what torch's exporter warns of
def test_models_and_deltas_of_torch_are_written(tmp_path: Path) -> None:
    save_file(tiny_vit().state_dict(), tmp_path / "tiny.safetensors")
    base: list[str | Path] = [
        "--checkpoint",
        tmp_path / "tiny.safetensors",
        "--adaptive",
        "-o",
        tmp_path / "adaptive.onnx",
    ]
    sizes = [f"--model-kwargs={name}={value}" for name, value in TINY.items()]
    model = ["--model", "vit_tiny_patch16_224", "--num-classes", str(NUM_CLASSES), *sizes]
    assert remtta_here("export", *model, *base) == 0
    check_equal(Device(tmp_path / "adaptive.onnx"), fast(tiny_vit()), stream(4))
    delta = delta_at(tmp_path / "delta.safetensors", 1, head__bias=torch.linspace(-1, 1, NUM_CLASSES))
    assert remtta_here("export", delta, *base, "--overwrite") == 0
    adapted = tiny_vit()
    apply_delta(adapted, load_delta(delta))
    check_equal(Device(tmp_path / "adaptive.onnx"), fast(adapted), stream(4))


def check_next(device: Device, pipeline: Pipeline, images: Tensor, tolerance: float) -> None:
    """Compare the predictions of the next batch at the same temperature, and both temperatures."""
    prediction, got = pipeline.predict(images), device(images)
    pipeline.learn()
    assert prediction.temperature is not None
    assert prediction.temperature == pytest.approx(device.status[2], abs=0.02)
    expected = (prediction.logits * (prediction.temperature / float(device.status[2]))).softmax(-1)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


def with_norms(clean: Tensor | None = None) -> nn.Module:
    """A convolutional network with batch norms, whose statistics are those of clean images, or of none."""
    torch.manual_seed(0)
    layers: list[Any] = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 12, 3, 2, 1, groups=4), nn.BatchNorm2d(12, eps=1e-3), nn.Hardtanh(0, 6)]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    layers += [nn.Linear(48, 7)] if clean is not None else [nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Linear(16, 7)]
    norms = [layer for layer in layers if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            assert tensor is not None
            nn.init.uniform_(tensor, 0.2, 2)
    nn.init.normal_(layers[-1].weight)
    network = nn.Sequential(*layers)
    if clean is not None:
        for norm in norms:
            norm.momentum = 1
        network.train()(clean)
    return ModelWithMetadata(network.eval(), preprocessing=Preprocessing((32, 32)))


def exportable(model: nn.Module) -> ExportableModel:
    return ExportableModel(model, {}, model_info(model), Delta({}, "x", "", "source"), ())


def check_equal_with_norms(device: Device, pipeline: Pipeline, batches: list[Tensor], tolerance: float = 1e-3) -> None:
    for images in batches:
        check_next(device, pipeline, images, tolerance)


@pytest.mark.filterwarnings("ignore")  # what torch's exporter warns of
def test_batch_norms_of_torch_follow_the_stream(tmp_path: Path) -> None:
    save_adaptive(exportable(with_norms()), tmp_path / "a.onnx")
    source = Adapter(with_norms(), "center").pipeline
    differs = 0.0
    for size in (1, 4, 20):
        device, model = Device(tmp_path / "a.onnx"), with_norms()
        pipeline = build_pipeline(model, model_info(model), AdaptationConfig("fast").with_guard())
        check_equal_with_norms(device, pipeline, stream(size))
        assert device.status[0] == pytest.approx(float(pipeline.centering.offsets["adapted"].norm()), abs=2e-3)
        assert device.status[1] == pytest.approx(float(pipeline.centering.class_fraction_kept), abs=5e-3)
        assert device.status[4] == 160
    for images in stream(20):
        differs = max(differs, float((device(images) - source(images).softmax(-1)).abs().max()))
    assert differs > 0.1


def fixed(path: Path, batch: int) -> Path:
    """Fix the number of images of an exported file."""
    proto = onnx.load(path)
    for each in (*proto.graph.input, *proto.graph.output):
        each.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(proto, path.with_name("fixed.onnx"))
    return path.with_name("fixed.onnx")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [None, 1, 4])
def test_batch_norms_in_a_file_follow_the_stream(tmp_path: Path, batch: int | None) -> None:
    model = with_norms()
    save_onnx(exportable(model), tmp_path / "plain.onnx")
    path = tmp_path / "plain.onnx" if batch is None else fixed(tmp_path / "plain.onnx", batch)
    device = adaptive(load(path), tmp_path / "adaptive.onnx")
    pipeline = fast(model)
    check_equal_with_norms(device, pipeline, stream(batch or 4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [None, 4])
def test_folded_batch_norms_follow_the_stream_by_clean_images(tmp_path: Path, batch: int | None) -> None:
    """With the clean images of the model's own statistics, convolutions with folded norms equal batch norms."""
    clean = 2 * torch.cat([random_images(10, number, 32) for number in range(5)]) + 0.3
    model = with_norms(clean)
    save_onnx(exportable(model), tmp_path / "plain.onnx")
    path = tmp_path / "plain.onnx" if batch is None else fixed(tmp_path / "plain.onnx", batch)
    device = folded(path, clean)
    check_equal_with_norms(device, fast(model), stream(batch or 4), 0.01)  # torch's variances are unbiased


def folded(path: Path, clean: Tensor, **metadata: str) -> Device:
    """Let onnxruntime fold a file's batch norms, and write one that adapts itself by clean images."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path.with_name("folded.onnx"))
    onnxruntime.InferenceSession(str(path), options)
    proto = onnx.load(path.with_name("folded.onnx"))
    assert not any(node.op_type == "BatchNormalization" for node in proto.graph.node)
    write_adaptive(load(path.with_name("folded.onnx")), path.with_name("a.onnx"), metadata, clean=clean.split(10))
    return Device(path.with_name("a.onnx"))


class Calibration:
    """Batches for onnxruntime's quantiser."""

    def __init__(self, images: Tensor) -> None:
        self._batches = iter(images.split(10))

    def get_next(self) -> dict[str, np.ndarray] | None:
        images = next(self._batches, None)
        return None if images is None else {"images": images.numpy()}


@pytest.mark.filterwarnings("ignore")
def test_an_int8_file_with_folded_batch_norms_follows_the_stream(tmp_path: Path) -> None:
    clean = 2 * torch.cat([random_images(10, number, 32) for number in range(5)]) + 0.3
    save_onnx(exportable(with_norms(clean)), tmp_path / "plain.onnx")
    folded(tmp_path / "plain.onnx", clean)
    quantize_static(tmp_path / "folded.onnx", tmp_path / "int8.onnx", Calibration(clean))
    write_adaptive(load(tmp_path / "int8.onnx"), tmp_path / "b.onnx", {}, clean=clean.split(10))
    device = Device(tmp_path / "b.onnx")
    center = adaptive(load(tmp_path / "int8.onnx"), tmp_path / "c.onnx")
    difference = torch.stack([(device(images) - center(images)).abs().max() for images in stream(4)[:10]])
    assert difference.isfinite().all() and difference.max() > 0.01
    state = device.state
    device(torch.full((1, 3, 32, 32), NAN))
    assert state.tobytes() == device.state.tobytes()


@pytest.mark.filterwarnings("ignore")
def test_convolutions_with_quantised_outputs_stay_in_integers(tmp_path: Path) -> None:
    clean = 2 * torch.cat([random_images(10, number, 32) for number in range(5)]) + 0.3
    save_onnx(exportable(with_norms(clean)), tmp_path / "plain.onnx")
    folded(tmp_path / "plain.onnx", clean)
    options = {"activation_type": QuantType.QUInt8, "op_types_to_quantize": ["Conv", "Gemm"]}
    quantize_static(tmp_path / "folded.onnx", tmp_path / "int8.onnx", Calibration(clean), **options)
    write_adaptive(load(tmp_path / "int8.onnx"), tmp_path / "b.onnx", {}, clean=clean.split(10))
    operators = fused(tmp_path / "b.onnx")
    assert operators.count("QLinearConv") == 4 and "Conv" not in operators
    assert operators.count("BatchNormalization") == 2
    device = Device(tmp_path / "b.onnx")
    center = adaptive(load(tmp_path / "int8.onnx"), tmp_path / "c.onnx")
    difference = torch.stack([(device(images) - center(images)).abs().max() for images in stream(4)[:10]])
    assert difference.isfinite().all() and difference.max() > 0.01


@pytest.mark.filterwarnings("ignore")
def test_clean_images_are_cropped_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the whole image, not from what the model sees of it, and in a new run as before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean").mkdir()
    for number in range(20):  # only the center, which the model sees, is black
        image = Image.new("RGB", (120, 40), (255, 255, number))
        image.paste((0, 0, 0), (40, 0, 80, 40))
        image.save(tmp_path / "clean" / f"{number}.png")
    save_onnx(exportable(with_norms(random_images(20, 1, 32))), tmp_path / "plain.onnx")
    folded(tmp_path / "plain.onnx", random_images(20, 1, 32))
    given: list[list[Tensor]] = []
    monkeypatch.setattr("remtta.formats.adaptive.writing.write_adaptive", lambda *_, clean: given.append(list(clean)))
    for name in ("first", "again"):
        args = ["--adaptive", "-o", f"{name}.onnx", "--mean", "0.5", "--source-data", "clean"]
        remtta_here("export", "folded.onnx", *args)
    first, again = (torch.cat(batches) for batches in given)
    assert first.shape == (20, 3, 32, 32) and torch.equal(first, again)
    assert len({image[:2].mean().item() for image in first}) > 10 and (first[:, :2] == first.max()).any()


@pytest.mark.filterwarnings("ignore")
def test_source_data_are_for_folded_batch_norms_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / "clean", range(20))
    folded_model = with_norms(random_images(20, 1, 32))
    save_onnx(exportable(folded_model), tmp_path / "plain.onnx")
    folded(tmp_path / "plain.onnx", random_images(20, 1, 32))
    write_onnx(tmp_path / "tiny.onnx")
    args = ["--adaptive", "-o", "adaptive.onnx", "--mean", "0.5", "--source-data", "clean"]
    line = refusal_of(capfd, "export", "plain.onnx", *args)
    assert line.endswith("plain.onnx has its batch norms; leave --source-data out")
    line = refusal_of(capfd, "export", "tiny.onnx", *args)
    assert line.endswith("tiny.onnx has no convolutions that batch norms were folded into; leave --source-data out")
    assert remtta_here("export", "folded.onnx", *args) == 0
    printed = capfd.readouterr().err
    assert "--source-data: 20 images are too few for batch norms" in printed
    assert "do not follow" not in printed and "assuming" not in printed
    with pytest.raises(SystemExit, match=r"and folded\.onnx has none: name the model in torch"):
        runpy.run_path(str(EXAMPLES.parent / "check_adaptive.py"))["main"](["adaptive.onnx", "folded.onnx", "clean"])
    assert remtta_here("doctor", "clean", "--model", "adaptive.onnx", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["works"] and found["state_numbers"] == 5 * 7 + 2 * 20 + 16 and "predicts_as_fast" not in found
    tell_once.cache_clear()
    assert remtta_here("export", "folded.onnx", *args[:-2], "--overwrite") == 0
    advice = "folded.onnx do not follow the stream; those of a file by remtta export --adaptive --source-data FOLDER"
    assert advice in capfd.readouterr().err
    tell_once.cache_clear()
    assert remtta_here("adapt", "clean", "--model", "folded.onnx", "-o", "run", "--mean", "0.5") == 0
    assert capfd.readouterr().err.count(advice) == 1
    tell_once.cache_clear()
    assert remtta_here("adapt", "clean", "--model", "plain.onnx", "-o", "run2", "--mean", "0.5") == 0
    assert "batch norms of plain.onnx do not follow the stream; those of a file by remtta export --adaptive do" in (
        capfd.readouterr().err
    )
    assert remtta_here("adapt", "clean", "--model", "tiny.onnx", "-o", "run3", "--mean", "0.5") == 0
    assert "do not follow" not in capfd.readouterr().err
    assert Device(tmp_path / "adaptive.onnx").state.shape == (4 * 7 + 15,)


@pytest.mark.filterwarnings("ignore")
def test_an_image_that_is_not_finite_changes_no_statistics(tmp_path: Path) -> None:
    save_adaptive(exportable(with_norms()), tmp_path / "a.onnx")
    device, clean = Device(tmp_path / "a.onnx"), Device(tmp_path / "a.onnx")
    for images in stream(4)[:4]:
        got = device(torch.cat([images[:2], torch.full((1, 3, 32, 32), NAN), images[2:]]))
        torch.testing.assert_close(got[[0, 1, 3, 4]], clean(images), atol=1e-6, rtol=0)
        assert got[2].isnan().all()
    np.testing.assert_allclose(device.state, clean.state, atol=1e-5)
    state = device.state
    device(torch.full((2, 3, 32, 32), NAN))
    assert state.tobytes() == device.state.tobytes()
    again = Device(tmp_path / "a.onnx")
    again.state = state
    assert torch.equal(again(images), device(images))  # a restart


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("--adaptive -o a.onnx", "name a run, a delta, an ONNX file, or a model with --model"),
        ("tiny.onnx --adaptive -o a.onnx --format onnx", "leave --format out"),
        ("tiny.onnx --adaptive -o a.onnx --model b.onnx", "tiny.onnx and --model b.onnx are both models"),
        ("tiny.onnx --adaptive -o a.bin", "must end in .onnx"),
        ("tiny.onnx --adaptive -o tiny.onnx", "exists"),
        ("tiny.onnx --adaptive -o tiny.onnx --overwrite", "would replace its own input"),
        ("no.onnx --adaptive -o a.onnx", "no such model file"),
        ("tiny.onnx --format onnx -o folder", "name a run or a delta; a model as it is needs --adaptive"),
        ("run -o folder", "name a --format"),
        ("run --format onnx -o folder --source-data .", "--source-data is for --adaptive"),
        ("tiny.onnx --adaptive -o a.onnx --source-data no", "neither a folder of images"),
        ("tiny.onnx --adaptive -o a.onnx --source-data .", "no images in ."),
    ],
)
def test_wrong_use_is_refused(
    args: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = write_onnx(tmp_path / "tiny.onnx").read_bytes()
    assert problem in refusal_of(capfd, "export", *args.split())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]
    assert Path("tiny.onnx").read_bytes() == content


WITHOUT = """
import runpy, sys
sys.modules.update(remtta=None, torch=None)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_device_needs_neither_remtta_nor_torch(frames: Path, tmp_path: Path) -> None:
    path = tmp_path / "adaptive.onnx"
    options: list[str | Path] = ["--adaptive", "-o", path, "--labels", tmp_path / "labels.txt", "--crop-pct", "1"]
    (tmp_path / "labels.txt").write_text("\n".join("abcdefg"))
    assert remtta_here("export", write_onnx(tmp_path / "tiny.onnx"), *options) == 0
    rows = []
    for half in (0, 6):  # the second half in a process of its own
        folder = tmp_path / f"from {half}"
        folder.mkdir()
        for number in range(half, half + 6):
            shutil.copy(frames / f"frame_{number}.png", folder / f"{number:02}.png")
        script = EXAMPLES / "classify.py"
        args = [sys.executable, "-I", "-c", WITHOUT, script, path, folder, "--state", tmp_path / "state.npy"]
        done = subprocess.run(list(map(str, args)), cwd=tmp_path, capture_output=True, text=True, check=True)
        rows += [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        remtta_here("adapt", frames, "--model", tmp_path / "tiny.onnx", "-o", tmp_path / "run", "-b", "1", *options[3:])
        == 0
    )
    expected = rows_of(tmp_path / "run")
    assert [row["class"] for row in rows] == [row["class"] for row in expected]
    assert [row["label"] for row in rows] == ["abcdefg"[row["class"]] for row in rows]
    assert [row["prob"] for row in rows] == pytest.approx([row["prob"] for row in expected], abs=1e-3)
    assert [row["status"]["images"] for row in rows] == list(range(1, 13))


def test_an_onnx_file_needs_no_exporter(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_onnx(tmp_path / "tiny.onnx")
    assert remtta_here("adapt", frames, "--model", "tiny.onnx", "--output", "run", "--mean", "0.5", "--std", "0.2") == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else find_spec(name))
    assert remtta_here("export", "tiny.onnx", "--adaptive", "-o", "a.onnx") == 0
    assert remtta_here("export", "run", "--adaptive", "-o", "b.onnx") == 0
    assert remtta_here("export", "run", "--format", "onnx", "-o", "folder") == 0
    line = refusal_of(capfd, "export", "--model", "remtta-demo", "--adaptive", "-o", "c.onnx")
    assert "an export needs onnxscript" in line


def test_the_example_for_python_refuses_what_it_cannot_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, batches = write_onnx(tmp_path / "tiny.onnx"), write_onnx(tmp_path / "batches.onnx", batch=3)
    for path in (plain, batches):
        assert remtta_here("export", path, "--adaptive", "-o", path.with_suffix(".a.onnx"), "--mean", "0.5") == 0
        assert "the model's preprocessing is partly unknown: assuming --std" in capfd.readouterr().err
    size = onnxruntime.InferenceSession(str(tmp_path / "tiny.a.onnx")).get_inputs()[1].shape[0]
    np.save(tmp_path / "longer.npy", np.zeros(size + 1, np.float32))
    np.save(tmp_path / "others.npy", np.full(size, 3, np.float32))
    (tmp_path / "damaged.npy").write_bytes(b"\x93NUM")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "text.onnx").write_text("no model")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    main = runpy.run_path(str(EXAMPLES / "classify.py"))["main"]
    for name, state, problem in (
        ("no.onnx", "new.npy", "no.onnx: no such file"),
        ("tiny.onnx", "new.npy", "tiny.onnx does not adapt itself; remtta export --adaptive makes a file of it that"),
        ("batches.a.onnx", "new.npy", "batches.a.onnx takes 3 images at once; export its classifier for any number"),
        ("tiny.a.onnx", "longer.npy", f"longer.npy has {size + 1} numbers, not {size}: it is another model's"),
        ("tiny.a.onnx", "others.npy", "others.npy is another model's; remove it to begin a new stream"),
        ("tiny.a.onnx", "damaged.npy", "damaged.npy is damaged; remove it to begin a new stream"),
        ("tiny.a.onnx", "empty.npy", "empty.npy is damaged; remove it to begin a new stream"),
        ("text.onnx", "new.npy", "text.onnx cannot be loaded by ONNX Runtime"),
        ("tiny.a.onnx", "no folder/new.npy", "new.npy cannot be written: No such file or directory"),
    ):
        before = {path: path.read_bytes() for path in tmp_path.glob("*.npy")}
        with pytest.raises(SystemExit, match=re.escape(problem)):
            main([str(tmp_path / name), str(tmp_path), "--state", str(tmp_path / state)])
        assert before == {path: path.read_bytes() for path in tmp_path.glob("*.npy")}
    with pytest.raises(SystemExit, match=r"nowhere: no such folder"):
        main([str(tmp_path / "tiny.a.onnx"), str(tmp_path / "nowhere")])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SystemExit, match=r"nothing has no images \(.jpg, .jpeg, .png\)"):
        main([str(tmp_path / "tiny.a.onnx"), str(tmp_path / "nothing")])


def test_the_example_for_python_writes_its_state_when_a_service_manager_stops_it(frames: Path, tmp_path: Path) -> None:
    model, folder, state = tmp_path / "adaptive.onnx", tmp_path / "many", tmp_path / "state.npy"
    assert remtta_here("export", write_onnx(tmp_path / "tiny.onnx"), "--adaptive", "-o", model) == 0
    folder.mkdir()
    for number in range(2000):  # more rows than a pipe holds, so that it waits
        (folder / f"{number}.png").symlink_to(frames / "frame_0.png")
    command = [sys.executable, EXAMPLES / "classify.py", model, folder, "--state", state]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert np.load(state).any()


def test_the_example_for_python_reads_images_as_remtta_does(
    frames: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tmp_path / "images", write_onnx(tmp_path / "tiny.onnx")
    folder.mkdir()
    image, exif = Image.open(frames / "frame_0.png").convert("RGB"), Image.Exif()
    exif[0x0112] = 6  # rotated
    image.save(folder / "a.png", exif=exif)
    grey = np.asarray(image.convert("L"), np.uint16) * 256 + np.arange(image.width, dtype=np.uint16)
    Image.fromarray(grey).save(folder / "b.png")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(folder / "c.png")
    content = (folder / "c.png").read_bytes()
    (folder / "d.png").write_bytes(content[: len(content) // 2])
    options = ["--mean", "0.5", "0.4", "0.3", "--std", "0.2", "--crop-pct", "1"]
    assert remtta_here("export", path, "--adaptive", "-o", tmp_path / "adaptive.onnx", *options) == 0
    assert remtta_here("adapt", folder, "--model", path, "-o", tmp_path / "run", "-b", "1", *options) == 0
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / "classify.py"))["main"]([str(tmp_path / "adaptive.onnx"), str(folder)])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("prob") for row in rows[:3]] == pytest.approx(
        [row["prob"] for row in rows_of(tmp_path / "run")[:3]], abs=1e-4
    )
    assert "truncated" in rows[3]["error"]


@pytest.fixture(scope="module")
def node() -> str:
    """Node.js, which finds onnxruntime-web."""
    found = shutil.which("node")
    if not found:
        pytest.skip("no Node.js")
    here = Path(__file__).parent
    if subprocess.run([found, "-p", "require.resolve('onnxruntime-web')"], cwd=here, capture_output=True).returncode:
        pytest.skip("Node.js finds no onnxruntime-web, neither in NODE_PATH nor in node_modules: npm install it")
    return found


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("bias", 1),
        ("softmax", 4),
        ("channels last", 20),
        ("one at a time", 1),
        ("quantised", 4),
        ("pixels", 4),
        ("float16", 4),
    ],
)
def test_the_example_for_the_web_predicts_as_fast_does(node: str, tmp_path: Path, form: str, size: int) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", pooled=False, **FORMS.get(form, {}))
    (tmp_path / "labels.txt").write_text("à\nb\nc\nd\ne\nf\ng", encoding="utf-8")
    device = tmp_path / "device"
    device.mkdir()
    shutil.copy(EXAMPLES / "classifier.mjs", device)
    options = ["--labels", str(tmp_path / "labels.txt"), "--input-size", "32"]
    mean, std = torch.zeros(3), 1.0
    if form == "pixels":
        taking_pixels(path)
    else:
        mean, std = torch.tensor([0.5, 0.4, 0.3]), 0.25
        options += ["--mean", "0.5", "0.4", "0.3", "--std", "0.25"]
    assert remtta_here("export", path, "--adaptive", "-o", device / "adaptive.onnx", *options) == 0

    pixels = torch.cat([(255 * images.sigmoid()).to(torch.uint8) for images in stream(size)])
    rgba = torch.cat([pixels, torch.full_like(pixels[:, :1], 255)], 1).permute(0, 2, 3, 1).numpy()
    parts = []
    for half in np.split(rgba, 2):  # the second half in a process of its own, with the state of the first
        args = [node, str(Path(__file__).with_name("web.cjs")), "classifier.mjs", "adaptive.onnx", "state", str(size)]
        done = subprocess.run(args, cwd=device, input=half.tobytes(), capture_output=True, check=True)
        parts.append(json.loads(done.stdout))

    assert [part["images"] for part in parts] == [80, 160] and parts[0]["labels"] == list("àbcdefg")
    images = (pixels / 255 - mean[:, None, None]) / std
    model, tolerance = load(path, input_size=32), 1e-4
    if form == "float16":  # the file centers logits before onnxruntime rounds them
        model, tolerance = load(with_float_output(path), input_size=32), 2e-3
    pipeline = fast(model)
    expected = torch.cat([pipeline(batch).softmax(-1) for batch in images.split(size)])
    got = torch.tensor([row for part in parts for row in part["probabilities"]])
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    sure = expected.topk(2).values @ torch.tensor([1.0, -1.0]) > 2 * tolerance
    assert torch.equal(got.argmax(-1)[sure], expected.argmax(-1)[sure])
    source = model(images[[0, 80]]).softmax(-1)
    torch.testing.assert_close(torch.tensor([part["source"] for part in parts]), source, atol=tolerance, rtol=0)


def test_the_example_for_the_web_refuses_what_it_cannot_run(node: str, tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "tiny.onnx", batch=3)
    assert remtta_here("export", path, "--adaptive", "-o", tmp_path / "adaptive.onnx", "--mean", "0.5") == 0
    for name, problem in (
        ("adaptive.onnx", b"the file takes 3 images at once; export its classifier for any number of them"),
        ("tiny.onnx", b"the file does not adapt itself; remtta export --adaptive makes one that does"),
    ):
        args = [node, str(Path(__file__).with_name("web.cjs")), str(EXAMPLES / "classifier.mjs"), name, "x", "1"]
        done = subprocess.run(args, cwd=tmp_path, input=bytes(4 * 32 * 32), capture_output=True)
        assert problem in done.stderr


@pytest.mark.skipif(not find_spec("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize(("form", "size"), [("softmax", 4), ("one at a time", 1), ("quantised", 20)])
def test_openvino_predicts_as_fast_does(tmp_path: Path, form: str, size: int) -> None:
    model = load(write_onnx(tmp_path / "tiny.onnx", pooled=False, **FORMS[form]))
    device = adaptive(model, tmp_path / "adaptive.onnx")
    images = torch.cat(stream(size))
    np.save(tmp_path / "images.npy", images)
    script, files = Path(__file__).with_name("in_openvino.py"), ["adaptive.onnx", "images.npy", size, "found.npy"]
    args = [sys.executable, "-I", "-c", WITHOUT, script, *files]
    subprocess.run(list(map(str, args)), cwd=tmp_path, check=True)
    got, pipeline = torch.from_numpy(np.load(tmp_path / "found.npy")), fast(model)
    got = got if device.returns_probabilities else got.softmax(-1)
    expected = torch.cat([pipeline(batch).softmax(-1) for batch in images.split(size)])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_the_example_that_checks_files_finds_a_wrong_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES.parent / "check_adaptive.py"))["main"]
    folder = draw_folder(tmp_path / "frames", range(40))
    for number, path in enumerate(sorted(folder.iterdir())):
        (folder / f"{number % 3}").mkdir(exist_ok=True)
        path.rename(folder / f"{number % 3}" / path.name)
    codes = []
    for fault in (None, SLOPE):
        path = write_onnx(tmp_path / "tiny.onnx", pooled=False)
        write_adaptive(load(path), tmp_path / "adaptive.onnx", {"adaptive": '["", "", "temperature"]'})
        if fault:
            add_fault(tmp_path / "adaptive.onnx", "logits", fault)
        args = [tmp_path / "adaptive.onnx", path, folder, "--streams", "1", "7", "7-sorted"]
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, args)))
        codes.append(ended.value.code)
    assert codes == [0, 1]
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "| order | batch | images | other classes | largest difference | NaN ignored | restart exact |"
    assert [row.split(" | ")[:4] for row in rows[2:5]] == [
        ["| shuffled", "1", "40", "0"],
        ["| shuffled", "7", "40", "0"],
        ["| sorted", "7", "40", "0"],
    ]


@pytest.mark.filterwarnings("ignore")  # what torch's exporter warns of
def test_the_example_that_checks_files_begins_each_stream_anew(tmp_path: Path) -> None:
    save_adaptive(exportable(with_norms()), tmp_path / "adaptive.onnx")
    model = with_norms()
    compare = runpy.run_path(str(EXAMPLES.parent / "check_adaptive.py"))["compare"]
    batches = [[Path(f"{number}"), Path(f"{number + 1}")] for number in range(0, 20, 2)]
    for _ in range(2):
        row = compare(tmp_path / "adaptive.onnx", model, batches, lambda path: random_images(1, int(path.name))[0] + 1)
        assert row["largest difference"] < 1e-3 and row["restart exact"]
