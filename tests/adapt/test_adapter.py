"""The adapter and the stream of answers, beside the command that is built of the same parts."""

import copy
import math
import pickle
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from remtta import (
    REM,
    Adapter,
    Preprocessing,
    RunOptions,
    adapt_stream,
    apply_delta,
    load_delta,
    load_model,
    save_delta,
    stream,
)
from remtta.errors import ModelError, NotFiniteError, StreamError, UsageError
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.methods.table import method_config
from remtta.streams.frames import Frame
from remtta.streams.live import LiveSource
from remtta.streams.sources import Stream, open_stream
from tests.conftest import NUM_CLASSES, png, random_images, same_tensors, tiny_vit
from tests.lab.evaluation.trees import open_tree, write_tree
from tests.records import rows_of

GIVEN: dict[str, Any] = {"batch_size": 5, "lr": 0.01, "seed": 3}


def adapter_of(**more: Any) -> Adapter:
    return Adapter(tiny_vit(), **{**GIVEN, **more})


def batches(count: int) -> list[Tensor]:
    return [random_images(5, seed) for seed in range(count)]


def test_the_stream_answers_as_the_command_does(frames: Path, tmp_path: Path) -> None:
    adapter = adapter_of()
    results = list(stream(frames, adapter))
    options = RunOptions(batch_size=5, seed=3)
    adapt_stream(tiny_vit(), frames, tmp_path / "run", config=adapter.config, options=options)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == len(results) == 12
    for row, result in zip(rows, results, strict=True):
        assert (row["index"], row["source"], row["class"]) == (result.index, result.source, result.class_id)
        assert row["prob"] == pytest.approx(result.prob, abs=1e-6) and row["adapted"] == result.adapted
        assert [each["class"] for each in row["topk"]] == [number for number, _, _ in result.top5]
        assert result.probs.shape == (NUM_CLASSES,) and result.label is None and result.time_s is None
        assert result.image.size == (32, 32)
    saved = load_delta(tmp_path / "run").tensors
    assert same_tensors(saved, adapter.delta())


def test_the_same_images_in_any_form_are_answered_alike() -> None:
    raw = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pictures, gray = [image.permute(1, 2, 0).numpy() for image in raw], list(raw[:, 0].numpy())
    made = Preprocessing((32, 32), (0.5,) * 3, (0.25,) * 3, crop_pct=1.0)
    in_color: list[Any] = [raw, made.normalise(raw), pictures, [Image.fromarray(each) for each in pictures]]
    in_gray: list[Any] = [
        [np.stack([each] * 3, axis=-1) for each in gray],
        gray,
        [Image.fromarray(each) for each in gray],
    ]
    for forms in (in_color, in_gray):
        answer, *others = (adapter_of(preprocessing=made)(images) for images in forms)
        assert answer.shape == (5, NUM_CLASSES) and answer.sum(1).allclose(torch.ones(5))
        for other in others:
            torch.testing.assert_close(other, answer, atol=1e-6, rtol=0)


def test_pictures_are_read_as_their_files_are(tmp_path: Path) -> None:
    shades = np.arange(40 * 40, dtype=np.uint16).reshape(40, 40) * 40
    turned, clear = Image.Exif(), Image.fromarray(np.dstack([shades // 256] * 4).astype(np.uint8), "RGBA")
    turned[0x0112] = 6  # a camera on its side
    Image.fromarray(shades).save(tmp_path / "a.png")
    clear.save(tmp_path / "b.png")
    clear.convert("RGB").save(tmp_path / "c.jpg", exif=turned)
    answers = adapter_of()([Image.open(path) for path in sorted(tmp_path.iterdir())])
    for answer, result in zip(answers, stream(tmp_path, adapter_of()), strict=True):
        np.testing.assert_allclose(answer, result.probs, atol=1e-6)


def test_what_are_no_images_is_refused_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    adapter, other = adapter_of(), adapter_of()
    grey, one = np.zeros((32, 32), np.float32), torch.zeros(3, 32, 32, dtype=torch.uint8)
    refused: list[tuple[Any, str]] = [
        ([], "at least one picture"),
        (Image.new("RGB", (32, 32)), r"for one, pass \[image\]"),
        (np.zeros((32, 32, 3), np.uint8), r"for one, pass \[image\]"),
        (None, "at least one picture"),
        ([np.zeros((0, 6, 3), np.uint8)], r"a picture is a PIL image, .* got uint8 of \(0, 6, 3\)"),
        ([Image.open(BytesIO(png(0)[:2000]))], "a picture cannot be read: image file is truncated"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.bool), r"images must be float32 .* got torch.bool"),
        (["a.png"], "a.png is a path, not a picture; pass paths to remtta.stream"),
        ("a.png", "a.png is a path, not a picture; pass paths to remtta.stream"),
        ([grey], r"uint8 array of shape .* got float32 of \(32, 32\); pass preprocessed images"),
        ([torch.zeros(3, 32, 32)], r"got torch.float32 of \(3, 32, 32\); pass preprocessed images as one tensor"),
        ([None], "got NoneType"),
        (torch.full((5, 3, 32, 32), torch.nan), "values that are not finite"),
        (torch.zeros(5, 3, 32, 32).to_sparse(), "must be a dense tensor, got a sparse_coo tensor"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8, device="meta"), "got a meta tensor"),
        (torch.zeros(5, 1, 32, 32), r"images must be float32 of shape \(B, 3, 32, 32\)"),
        (one, r"images must be uint8 of shape .*, got torch.uint8 of shape \(3, 32, 32\)$"),
        (one.permute(1, 2, 0)[None], r"32, 3\); images.permute\(0, 3, 1, 2\) puts the channels first$"),
        (torch.zeros(0, 3, 32, 32), r"images must be float32 of shape \(B, 3, 32, 32\)"),
        (torch.zeros(5, 3, 48, 48), r"images must be float32 of shape \(B, 3, 32, 32\)"),
    ]
    for images, told in refused:
        with pytest.raises(ValueError, match=told):
            adapter(images)
    assert not caplog.text
    assert torch.equal(adapter(batches(1)[0]), other(batches(1)[0]))
    assert same_tensors(adapter.delta(), other.delta())
    assert adapter.pipeline.method.num_updates == 1  # the first batch of its pace


def test_a_stream_is_read_once(frames: Path) -> None:
    opened, adapter = open_stream(frames), adapter_of()
    assert len(list(stream(opened, adapter))) == 12
    with pytest.raises(StreamError, match="the source has no frames"):
        list(stream(opened, adapter))
    assert not list(stream([], adapter))


def test_frames_that_are_answered_before_their_batch_is_full_are_yielded_and_learned_once(
    frames: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, early = adapter_of(), adapter_of()
    expected = list(stream(frames, usual))
    again = (Frame(each.source, partial(Image.open, each.source)) for each in expected)
    monkeypatch.setattr(early, "options", replace(early.options, flush_after=0))
    results = list(stream(Stream("the same", "paths", again), early))
    assert [result.index for result in results] == list(range(12))
    assert {len(result.probs) for result in results} == {NUM_CLASSES} and all(result.adapted for result in results)
    assert same_tensors(early.delta(), usual.delta())


def test_a_state_continues_in_another_adapter_to_the_same_answers() -> None:
    one, other, third = adapter_of(), adapter_of(), adapter_of()
    first, second, last = batches(3)
    one(first), one(second)
    other.load_state_dict(one.state_dict())
    answer = one(last)
    assert torch.equal(other(last), answer) and not torch.equal(third(last), answer)
    assert same_tensors(one.delta(), other.delta())


def test_a_state_continues_in_its_precision_where_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remtta.adapt.adapter.multiplies_bf16", lambda device: True)
    one, other, third = adapter_of(precision="bf16"), adapter_of(), adapter_of(precision="fp32")
    first, second, last = batches(3)
    for adapter in (one, other, third):
        adapter(first)
    for adapter in (other, third):
        adapter.load_state_dict(one.state_dict())
    assert (other.config.precision, third.config.precision) == ("bf16", "fp32")
    for images in (second, last):
        assert torch.equal(other(images), one(images))
    assert same_tensors(one.delta(), other.delta())
    fp32 = adapter_of().state_dict()
    other.load_state_dict({name: tensor for name, tensor in fp32.items() if name != "precision"})  # of 0.5.0
    assert other.config.precision == "bf16"
    other.load_state_dict(fp32)
    assert torch.equal(other(first), adapter_of()(first))


def test_a_saved_delta_says_what_was_learned_and_starts_another_adapter(tmp_path: Path) -> None:
    adapter, path = adapter_of(anchor=0.0), tmp_path / "delta.safetensors"
    first, second, last = batches(3)
    adapter(first)
    resumed = adapter_of(anchor=0.0)
    resumed.load_state_dict(adapter.state_dict())
    resumed(second)
    resumed.save_delta(path)
    with pytest.raises(UsageError, match=r"delta\.safetensors exists; choose another file, or leave out overwrite"):
        adapter.save_delta(path, overwrite=False)
    with pytest.raises(UsageError, match="the file of a delta must be a path, got None"):
        adapter.save_delta(None, overwrite=False)  # type: ignore[arg-type]
    assert repr(resumed) == "Adapter(VisionTransformer, method='remtta', updates=2, frozen=False)"
    delta = load_delta(path)
    assert (delta.method, delta.frames, delta.updates) == ("remtta", 10, 2) and delta.hyperparameters["batch_size"] == 5
    assert same_tensors(resumed.delta(), delta.tensors)
    apply_delta(tiny_vit(), delta)  # which would refuse another base
    started = adapter_of(delta=delta)
    started(last)
    started.save_delta(path)
    assert load_delta(path).frames == 15
    started.reset()
    started.save_delta(path)
    assert load_delta(path).frames == 0
    started(last)
    started.restart()
    started.save_delta(path)
    assert (load_delta(path).frames, load_delta(path).updates) == (0, 0)
    episodic = adapter_of(method="tent", episodic=True)
    episodic(first)
    episodic(second[:4])
    episodic.save_delta(path)
    assert (load_delta(path).frames, load_delta(path).updates) == (4, 1)
    with pytest.raises(UsageError, match="no delta to save: MEMO puts its weights back after every image"):
        Adapter(tiny_vit(), "memo").save_delta(path)
    with pytest.raises(UsageError, match="source changes no weights"):
        Adapter(tiny_vit(), "source").save_delta(path)


def test_the_state_of_another_model_or_method_is_refused_and_changes_nothing() -> None:
    adapter, own, sgd = adapter_of(), adapter_of().state_dict(), adapter_of(optimizer="sgd", momentum=0.9)
    sgd(batches(1)[0])
    another = "its base_sha256 is another or missing"
    others = [tiny_vit(seed=1), tiny_vit(depth=3), tiny_vit(num_classes=9)]
    states = [(Adapter(model, **GIVEN).state_dict(), another) for model in others]
    tent, old = adapter_of(method="tent").state_dict(), {name: own[name] for name in own if name != "base_sha256"}
    states += [({**own, "method": tent["method"]}, "its method is another or missing"), (old, another)]  # of 0.2.0
    wrong = {"updates": torch.tensor(-5), "frozen": torch.tensor(math.nan), "frames": torch.tensor([1, 2])}
    states += [({**own, name: value}, f".*its {name} is .*, not a count") for name, value in wrong.items()]
    junk: list[Any] = [None, 5, "state", [torch.zeros(1)], {**own, "updates": 3}, {**own, "precision": "bf16"}]
    states += [(state, ".*") for state in (*junk, sgd.state_dict(), {}, {**own, "more": torch.zeros(1)})]
    for state, why in states:
        with pytest.raises(UsageError, match=rf"does not fit an adapter of this model, method and settings \({why}\)$"):
            adapter.load_state_dict(state)
        assert same_tensors(adapter.state_dict(), own)
    assert torch.equal(adapter(batches(1)[0]), adapter_of()(batches(1)[0]))


def test_a_frozen_adapter_only_predicts_and_reset_brings_the_source_back(
    frames: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter, (first, second, last) = adapter_of(), batches(3)
    adapter(first), adapter(second)
    adapter.freeze()
    state = adapter.state_dict()
    answers = [adapter(last) for _ in range(3)]
    assert all(torch.equal(each, answers[0]) for each in answers)
    adapter(last[:1])
    assert not caplog.text  # one image is enough to predict
    assert not any(result.adapted for result in stream(frames, adapter))
    changed = {name for name, tensor in adapter.state_dict().items() if not torch.equal(tensor, state[name])}
    assert changed <= {"guard.looked"}
    adapter.reset()
    assert all(not tensor.any() for tensor in adapter.delta().values())
    again = adapter_of()
    again.load_state_dict(state)
    assert again.frozen and torch.equal(again(last), answers[0])
    again.unfreeze()
    again(last)
    assert not again.frozen and again.pipeline.method.num_updates == 3


def test_autocast_does_not_reach_a_stream(frames: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        results = list(stream(frames, adapter_of()))
    assert [each.prob for each in results] == [each.prob for each in stream(frames, adapter_of())]


def test_the_guard_reports_what_it_does(caplog: pytest.LogCaptureFixture, frames: Path) -> None:
    adapter = adapter_of(method="tent", lr=1e3, guard="rollback")
    for images in batches(2):  # the second one shows what the update by the first has done
        adapter(images)
    assert "weights far from the source's: back to the source weights, at 0.5 of the learning rate" in caplog.text
    list(stream(frames, adapter))
    assert caplog.text.count("back to the source weights") > 1 and not adapter.pipeline.events()


def test_raw_values_as_floats_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_of()
    adapter(3 * batches(1)[0])
    assert not caplog.messages
    for _ in range(2):
        adapter(255 * torch.rand(5, 3, 32, 32))
    assert len(caplog.messages) == 1 and "give raw images as uint8" in caplog.text


def test_labels_by_number_or_in_a_file(tmp_path: Path) -> None:
    names = list("abcdefg")
    (tmp_path / "labels.txt").write_text("\n".join(names))
    for labels in (names, dict(enumerate(names)), tmp_path / "labels.txt"):
        assert adapter_of(labels=labels).info.labels == names


def test_no_call_changes_the_callers_random_numbers(frames: Path, tmp_path: Path) -> None:
    def states() -> bytes:
        return pickle.dumps((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))

    model, seeds = tiny_vit(), states()
    adapter = Adapter(load_model("remtta-demo"), "rem", batch_size=6)
    list(stream(frames, adapter))
    LiveSource(0)._jitter()
    adapt_stream(model, frames, tmp_path / "run", method="cotta", options=RunOptions(batch_size=6))
    tree = open_tree(write_tree(tmp_path / "tree", ["fog"], severities=(), each=1))
    config = method_config("cotta", {}, batch_size=7)
    evaluate(model, tree, tmp_path / "table", methods={"cotta": config}, options=EvalOptions(batch_size=7))
    assert states() == seeds


@pytest.mark.parametrize(
    "settings",
    [{"method": "remtta"}, {"method": "tent"}, {"method": "roid"}, {"method": "memo", "num_augmentations": 4}],
)
def test_images_that_require_gradients_get_none(settings: dict[str, Any]) -> None:
    parameter = nn.Parameter(random_images(5))
    images = 2 * parameter
    answer = adapter_of(**settings)(images)
    assert not answer.requires_grad and torch.equal(answer, adapter_of(**settings)(images.detach()))
    assert torch.equal(REM(tiny_vit())(images), REM(tiny_vit())(images.detach()))
    images.sum().backward()
    assert parameter.grad is not None and parameter.grad.eq(2).all()


def test_outputs_that_are_not_finite_are_an_error_and_not_learned_from() -> None:
    adapter = adapter_of(guard="off", answer="adapted")
    first, last = batches(2)
    expected = adapter_of(guard="off", answer="adapted")(first)
    adapter.pipeline.method.model.weights.put([("blocks.0.norm1.weight", torch.full((48,), torch.nan))])
    for _ in range(2):
        with pytest.raises(NotFiniteError, match="outputs are not finite numbers; use a lower lr"):
            adapter(last)
    adapter.reset()
    assert adapter.pipeline.method.num_updates == 0 and torch.equal(adapter(first), expected)


def test_images_that_overflow_in_both_models_do_not_count_against_the_adaptation() -> None:
    adapter, untouched = adapter_of(), adapter_of()
    first, last = batches(2)
    assert torch.equal(adapter(first), untouched(first))
    for _ in range(9):  # more than the guard's retries
        with pytest.raises(NotFiniteError):
            adapter(torch.full_like(first, 3e38))
    assert adapter.pipeline.total_alarms == 0 and not adapter.pipeline.disabled
    assert torch.equal(adapter(last), untouched(last)) and adapter.pipeline.method.num_updates == 2


def test_numbers_of_numpy_are_settings() -> None:
    adapter = adapter_of(lr=np.float32(0.5), batch_size=np.int64(2), seed=np.int64(3))
    assert (type(adapter.config.lr), adapter.config.lr) == (float, 0.5)
    assert (type(adapter.options.batch_size), type(adapter.options.seed)) == (int, int)


def test_a_stream_without_a_readable_frame_fails(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(StreamError, match=r"no readable frame \(1 failed\)"):
        list(stream(tmp_path, adapter_of()))


def test_threads_share_an_adapter() -> None:
    adapter = adapter_of(method="rem")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(adapter, batches(8)))
    assert adapter.pipeline.method.num_updates == 8 and all(torch.isfinite(each).all() for each in answers)


def test_a_model_of_ones_own_with_its_own_output_and_labels(frames: Path, tmp_path: Path) -> None:
    class Detector(nn.Sequential):
        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {"logits": 2 * self[0](images)}

    names = list("abcdefg")
    adapter = Adapter(
        Detector(tiny_vit()),
        batch_size=4,
        output=lambda o: o["logits"],
        labels=names,
        preprocessing=Preprocessing((32, 32)),
    )
    results = list(stream(str(frames), adapter))
    assert {result.label for result in results} <= set(names) and adapter.pipeline.method.num_updates == 3
    shown = rf"Result\(index=0, source='.*', .*label='{results[0].label}', prob=0\.\d+, adapted=True\)"
    assert re.fullmatch(shown, repr(results[0]))
    assert all(name.startswith("0.") for name in adapter.delta())
    adapter.save_delta(tmp_path / "delta.safetensors")
    other = Detector(tiny_vit())
    apply_delta(other, load_delta(tmp_path / "delta.safetensors"), output=lambda o: o["logits"])
    changed = "0.blocks.0.norm1.weight"
    assert torch.equal(
        other.get_parameter(changed), adapter.pipeline.method.model.backbone.module.get_parameter(changed)
    )


def test_pictures_are_refused_where_their_preprocessing_is_unknown(frames: Path) -> None:
    """A size of 224 x 224 and ImageNet's mean, guessed, once cost 92 points on a model of 48 x 48 pixels."""
    adapter, raw = Adapter(own_net(), "fast"), torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8)
    pictures = [image.permute(1, 2, 0).numpy() for image in raw]
    told = r"preprocessing is unknown; pass remtta.Adapter .* preprocessing=remtta.Preprocessing\(\(H, W\), mean, std\)"
    for use in (lambda: adapter(raw), lambda: adapter(pictures), lambda: list(stream(frames, adapter))):
        with pytest.raises(UsageError, match=told):
            use()
    made = Preprocessing((48, 48), (0.0,) * 3, (1.0,) * 3)
    expected = adapter(raw / 255)
    for images in (raw, pictures):  # whole, not cropped
        torch.testing.assert_close(Adapter(own_net(), "fast", preprocessing=made)(images), expected)


def own_net() -> nn.Module:
    """A classifier of images of any size."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, NUM_CLASSES)).eval()


def test_a_delta_of_a_model_of_an_unusual_size_can_be_applied(tmp_path: Path) -> None:
    first, second = (nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(30, NUM_CLASSES)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    adapter = Adapter(first, "fast", preprocessing=(size := Preprocessing((5, 2))))
    adapter(torch.rand(4, 3, 5, 2))
    adapter.save_delta(tmp_path / "delta.safetensors")
    apply_delta(second, load_delta(tmp_path / "delta.safetensors"), preprocessing=size)
    assert torch.equal(second.get_buffer("0.running_mean"), first.get_buffer("0.running_mean"))


def under_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return tiny_vit()


def packed(**attributes: Any) -> Any:
    """A model with something in it that is no float weight."""
    model: Any = tiny_vit()
    model.fc_norm = type("Packed", (nn.Identity,), attributes)()
    return model


def with_integers() -> nn.Module:
    model = nn.Sequential(tiny_vit())
    model.register_parameter("first", nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False))
    return model


NOTHING: Any = None
NAME: Any = "vit"
PICTURE: Any = Image.new("RGB", (9, 9))
FLOAT32 = "adapt a float32 model"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: adapter_of(method="remta"), UsageError, "unknown method"),
    (lambda: adapter_of(method=20), UsageError, 'unknown method "20"'),
    (lambda: adapter_of(method="tent", mask_ratios=(0.0, 0.5)), UsageError, "unknown setting of tent"),
    (lambda: adapter_of(batch_size="4"), UsageError, "batch_size must be a whole number, got 4"),
    (lambda: adapter_of(seed=True), UsageError, "seed must be a whole number, got True"),
    (lambda: adapter_of(guard="stop"), UsageError, 'guard="stop" ends a run, and an Adapter has none'),
    (lambda: adapter_of(delta={}), UsageError, r"what remtta.load_delta returns, got dict; .* use load_state_dict"),
    (lambda: adapter_of(labels=["a"]), UsageError, "got 1 label for a model with 7 classes"),
    (lambda: adapter_of(labels=5), UsageError, "labels are class names, or a file with one per line, got 5"),
    (lambda: adapter_of(labels=dict(enumerate("abcdefg", 1))), UsageError, "need the numbers 0 to 6, got 1, 2"),
    (lambda: adapter_of().save_delta(NOTHING), UsageError, "the file of a delta must be a path, got None"),
    (lambda: load_delta(NOTHING), UsageError, "the file of a delta must be a path, got None"),
    (lambda: apply_delta(tiny_vit(), NAME), UsageError, "load_delta returns, got str"),
    (lambda: save_delta("a", {}), UsageError, "got dict; to save an Adapter's, use its"),  # type: ignore[arg-type]
    (lambda: list(stream(random_images(2), adapter_of())), UsageError, "got Tensor; pass images"),
    (lambda: list(stream(PICTURE, adapter_of())), UsageError, "got Image; pass"),
    (lambda: list(stream([], tiny_vit())), UsageError, r"stream needs a remtta\.Adapter, got VisionTransformer"),
    (lambda: Adapter(NAME), ModelError, r"a torch\.nn\.Module, got str; remtta\.load_model builds one"),
    (lambda: Adapter(tiny_vit().half(), "fast"), ModelError, rf"is torch\.float16; {FLOAT32}"),
    (lambda: Adapter(under_inference_mode()), ModelError, r"was made under torch\.inference_mode; build the model"),
    (lambda: Adapter(tiny_vit().to("meta")), ModelError, "no values in its weights, which are on the meta device"),
    (lambda: Adapter(packed(get_extra_state=lambda self: ())), ModelError, "quantised weights or other packed state"),
    (lambda: Adapter(with_integers()), ModelError, rf"first is torch\.int8; {FLOAT32}"),
    (lambda: copy.deepcopy(adapter_of()), TypeError, r"cannot be copied or pickled; load its state_dict\(\) into one"),
]


@pytest.mark.parametrize(("call", "error", "told"), REFUSED, ids=[told for _, _, told in REFUSED])
def test_what_is_wrong_is_refused_in_a_line(call: Callable[[], object], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        call()


def test_small_batches_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = Adapter(tiny_vit())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            adapter(random_images(2))
    assert caplog.text.count("pass batch_size=2 to remtta.Adapter") == 1


@pytest.mark.parametrize("within", [torch.inference_mode, partial(torch.device, "meta")])
def test_where_an_adapter_is_made_and_called_changes_no_answer(within: Any) -> None:
    model, outside, (first, last) = tiny_vit(), adapter_of(), batches(2)
    with within():
        inside = Adapter(model, **GIVEN)
        answer = inside(first)
    assert torch.equal(answer, outside(first)) and torch.equal(inside(last), outside(last))
    assert outside.pipeline.method.num_updates == inside.pipeline.method.num_updates == 2


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["remtta", "tent", "memo"])
def test_a_model_without_gradients_is_refused(how: Any, method: str) -> None:
    class Deployed(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            with how():
                return 2 * self[0](images)

    with pytest.raises(ModelError, match=r"the logits of Deployed have no gradients, so nothing can be learned"):
        Adapter(Deployed(tiny_vit()), method)(random_images(5))
    assert Adapter(Deployed(tiny_vit()), "fast")(random_images(5)).shape == (5, NUM_CLASSES)


def test_an_adapter_that_cannot_be_made_leaves_model_and_earlier_adapter_as_they_were() -> None:
    half, model, (images,) = tiny_vit().half().train(), tiny_vit(), batches(1)
    with pytest.raises(ModelError):
        Adapter(half)
    assert half.training and all(parameter.requires_grad for parameter in half.parameters())
    first = Adapter(model, **GIVEN)
    with pytest.raises(ModelError):
        Adapter(model, "norm")
    first(images)
    assert first.pipeline.method.num_updates == 1


def test_a_call_to_train_changes_no_answer() -> None:
    model, (first, last) = tiny_vit(proj_drop_rate=0.5), batches(2)
    adapter, other = Adapter(model, **GIVEN), Adapter(tiny_vit(proj_drop_rate=0.5), **GIVEN)
    for images in (first, last):
        model.train()
        assert torch.equal(adapter(images), other(images))


def test_a_second_adapter_of_a_model_takes_it_over(frames: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, (images,) = tiny_vit(), batches(1)
    first, second = Adapter(model, **GIVEN), Adapter(nn.DataParallel(model), **GIVEN)
    assert not caplog.text
    for use in (first, lambda images: list(stream(frames, first)), lambda _: first.reset()):
        with pytest.raises(UsageError, match=r"two cannot share one; build a model for each, or copy it before"):
            use(images)
    second(images)
    Adapter(model, **GIVEN)
    assert "weights have changed since it was first adapted" in caplog.text


def reloaded(model: nn.Module) -> nn.Module:
    torch.save(model, file := BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded, lambda model: copy.deepcopy(nn.DataParallel(model))])
def test_copies_of_an_adapted_model_are_reported(
    copied: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_vit()
    adapter = Adapter(model, **GIVEN)
    Adapter(copied(model), **GIVEN)
    adapter(batches(1)[0])
    changed = copied(model)
    adapter.reset()
    Adapter(copied(model), **GIVEN)
    assert not caplog.text  # of copies with the source weights
    Adapter(changed, **GIVEN)
    assert "have changed since it was first adapted, maybe before it was copied" in caplog.text


@pytest.mark.parametrize("method", ["remtta", "tent", "fast"])
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda model: model.to("meta")])
def test_a_model_that_is_converted_meanwhile_is_refused(
    method: str, convert: Callable[[nn.Module], nn.Module], frames: Path
) -> None:
    model, (images,) = tiny_vit(), batches(1)
    adapter = Adapter(model, method, batch_size=5)
    adapter(images)
    convert(model)
    for use in (lambda: adapter(images), lambda: list(stream(frames, adapter))):
        with pytest.raises(ModelError, match=r"weights have become torch\.\w+ on \w+ since the Adapter .*; build both"):
            use()
    adapter.close()


@pytest.mark.parametrize("method", ["remtta", "rem", "tent", "sar", "cotta", "rotta", "memo", "fast"])
def test_no_gradients_are_left_in_a_model(method: str) -> None:
    model = tiny_vit()
    adapter = Adapter(model, method, batch_size=5)
    for images in batches(2):
        adapter(images)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_require_gradients_as_before_once_no_adapter_is_left() -> None:
    model, (images,) = tiny_vit(), batches(1)
    model.get_parameter("head.weight").requires_grad_(False)

    def trainable() -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    before = trainable()
    first = Adapter(model, **GIVEN)
    assert sum(trainable().values()) < sum(before.values()) - 10
    first(images)
    second = Adapter(model, **GIVEN)
    during = trainable()
    del first  # whose model it is no longer
    assert trainable() == during
    del second
    assert trainable() == before
    third = Adapter(model, **GIVEN)
    third(images)
    weights = copy.deepcopy(model.state_dict())
    third.close()
    third.close()
    assert trainable() == before and same_tensors(model.state_dict(), weights)
    with pytest.raises(UsageError, match="the Adapter is closed; make another of its model"):
        third(images)
    assert not Adapter(model, **GIVEN).frozen
