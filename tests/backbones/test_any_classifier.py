"""Classifiers in memory: in wrappers, of other libraries, of one's own; beside timm's twins where there are such."""

import gc
import logging
import weakref
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from timm.layers import Attention
from torch import Tensor, fx, nn
from torch.nn import functional as F

from remtta import REM, Adapter, Delta, REMConfig, apply_delta, load_delta, load_model
from remtta.backbones.any_classifier import AnyClassifier
from remtta.backbones.batchnorm import running_statistics
from remtta.backbones.lookup import backbone_of, compile_blocks
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError, RemttaError
from remtta.methods.table import method_config
from remtta.models.info import model_info
from remtta.models.metadata import ModelWithMetadata
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.models.tensor_files import state_sha256
from tests.backbones.tiny_models import tiny
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.methods.making import QUICK, learner, pipeline_of, predicted
from tests.models.other_libraries import LABELS, TORCHVISION, TRANSFORMERS, randomised

MEAN, STD = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1)


class Normalise(nn.Module):
    """As the field's benchmarks put it before a model."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, images: Tensor) -> Tensor:
        return images.sub_(MEAN).div_(STD) if self.inplace else (images - MEAN) / STD


class Around(nn.Module):
    """A model of one's own around another."""

    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images - MEAN) / STD)
        return logits if self.scale == 1 else self.scale * logits


class Net(nn.Module):
    """Stages with norms of its own kind, and a forward pass with functions."""

    def __init__(self, returned: str = "logits") -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (3, 8, 12, 16, 16)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.fc = nn.Linear(16, NUM_CLASSES)
        self.returned = returned
        with torch.no_grad():
            self.fc.weight.normal_()

    def forward(self, images: Tensor) -> Any:
        x = images
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)))
            x = F.max_pool2d(x, 2) if number < 2 else x
        logits = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        found = {"logits": logits, "dict": {"boxes": x, "logits": logits}, "tuple": (logits, x), "map": x}
        return logits.softmax(-1) if self.returned == "probabilities" else found[self.returned]


def images_of(size: int, seed: int = 0) -> Tensor:
    """Each of another colour."""
    colours = torch.randn(6, 3, 1, 1, generator=torch.Generator().manual_seed(seed))
    return random_images(6, seed, size) + 3 * colours


def small(returned: str = "logits", output: Any = None) -> ModelWithMetadata:
    return ModelWithMetadata(Net(returned), output, preprocessing=Preprocessing((32, 32)))


def updates(model: nn.Module, batches: list[Tensor], **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of each batch, and the changes of the norms in the order of the model, after REM's updates."""
    rem = REM(model, REMConfig(lr=0.01, optimizer="sgd", mask_ratios=(0.0, 0.25, 0.5), **settings))
    logits = [rem(images) for images in batches]
    return logits, list(rem.delta().values())


def assert_like_twin(ours: nn.Module, twin: nn.Module, size: int, **settings: Any) -> None:
    batches = [images_of(size, seed)[:4] for seed in (1, 2)]
    found, expected = updates(ours, batches, **settings), updates(twin, batches, **settings)
    assert max(float(each.abs().max()) for each in expected[1]) > 1e-4
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "masking"), [("vit", "auto"), ("vit", "features"), ("swin", "auto"), ("resnet", "gradcam")]
)
def test_torchvisions_models_adapt_as_their_twins_in_timm(kind: str, masking: Any, tmp_path: Path) -> None:
    make, name, kwargs = TORCHVISION[kind]
    theirs, size = randomised(make()), kwargs.get("img_size", 64)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    twin = load_model(name, checkpoint=tmp_path / "weights.safetensors", num_classes=NUM_CLASSES, model_kwargs=kwargs)
    assert type(backbone_of(theirs)) is AnyClassifier and type(backbone_of(twin)) is not AnyClassifier
    assert_like_twin(ModelWithMetadata(theirs, preprocessing=Preprocessing((size, size))), twin, size, masking=masking)


@pytest.mark.parametrize("kind", ["vit", "dinov2 with registers", "convnext"])
def test_transformers_models_adapt_as_their_twins_in_timm(kind: str, tmp_path: Path) -> None:
    theirs = randomised(TRANSFORMERS[kind]())
    theirs.save_pretrained(tmp_path)
    size = 64 if kind == "convnext" else 32
    given = ModelWithMetadata(theirs, preprocessing=Preprocessing((size, size)))
    assert_like_twin(given, load_model(f"local-dir:{tmp_path}", input_size=(size, size)), size)
    theirs.config.id2label = dict(reversed(theirs.config.id2label.items()))
    assert model_info(given).labels == LABELS


@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        (lambda m: nn.DataParallel(Around(m)), tiny_vit),
        (Around, lambda: tiny("resnet")),
        (lambda m: nn.Sequential(Normalise(inplace=True), m), tiny_vit),
    ],
)
def test_a_wrapper_that_normalises_is_looked_through(wrap: Any, make: Any) -> None:
    model = make()
    size = preprocessing_of(model).input_size[0]
    wrapped = wrap(make())
    pixels = [images_of(size, seed).sigmoid() for seed in (1, 2)]
    found, expected = updates(wrapped, pixels), updates(model, [(each - MEAN) / STD for each in pixels])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert type(backbone_of(wrapped)) is type(backbone_of(model)) and backbone_of(wrapped).blocks
    taken = preprocessing_of(wrap(make()))
    assert (taken.mean, taken.std, taken.input_size) == ((0.0,) * 3, (1.0,) * 3, (size, size))
    adapted = pipeline_of("rem", wrapped).method.model
    torch.testing.assert_close(adapted.pixels.to_pixels(adapted.transform(pixels[0])), pixels[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [tiny_vit, lambda: randomised(TORCHVISION["vit"][0]()), Net])
def test_a_wrapper_may_resize_images(make: Any) -> None:
    enlarged = nn.Sequential(nn.Upsample(scale_factor=0.5), make())
    adapter = Adapter(enlarged, "rem", preprocessing=Preprocessing((64, 64)), masking="features")
    assert adapter.info.preprocessing.input_size == (64, 64)
    alone = Adapter(make(), "rem", preprocessing=Preprocessing((32, 32)), masking="features")
    pixels = images_of(64)
    torch.testing.assert_close(adapter(pixels), alone(F.interpolate(pixels, scale_factor=0.5)))
    torch.testing.assert_close(adapter.delta(), alone.delta())


def test_a_wrapper_that_changes_logits_is_not_looked_through() -> None:
    around = Around(tiny_vit(), scale=2.0).eval()
    backbone, images = backbone_of(around), images_of(32)
    assert isinstance(backbone, AnyClassifier) and backbone.module is around
    with torch.no_grad():
        assert torch.equal(backbone.logits(images), around(images))
    assert all(name.startswith("model.blocks.") for name in REM(around).method.model.weights.parameters)


def test_a_delta_of_a_wrapped_model_is_that_of_the_model_inside() -> None:
    wrapped, inner = nn.Sequential(Normalise(), tiny_vit()), tiny_vit()
    rem = REM(wrapped)
    rem(images_of(32).sigmoid())
    delta = Delta(rem.delta(), "unknown", state_sha256(inner), "rem", {}, 6, 1)
    apply_delta(inner, delta)
    assert model_info(nn.Sequential(Normalise(), tiny_vit())).sha256 == delta.base_sha256
    assert all(torch.equal(tensor, wrapped[1].state_dict()[name]) for name, tensor in inner.state_dict().items())


def test_a_model_tuned_with_peft_has_one_set_of_names(tmp_path: Path) -> None:
    tuning = peft.LoraConfig(target_modules=["qkv"], r=2, modules_to_save=["head"])
    first, second = (peft.get_peft_model(tiny_vit(), tuning) for _ in range(2))
    second.load_state_dict(first.state_dict())
    adapter = Adapter(first, batch_size=6)
    adapter(images_of(32))
    adapter.save_delta(tmp_path / "delta.safetensors")
    assert "head.modules_to_save.default.bias" in adapter.delta() and "blocks.0.norm1.bias" in adapter.delta()
    apply_delta(second, load_delta(tmp_path / "delta.safetensors"))


def test_a_model_may_change_its_input_in_place() -> None:
    around = [nn.Sequential(Normalise(inplace=each), nn.BatchNorm2d(3), small().module) for each in (False, True)]
    found = [updates(model, [images_of(32, seed).sigmoid() for seed in (1, 2)]) for model in around]
    torch.testing.assert_close(found[1], found[0])


class OwnAttention(Attention):  # type: ignore[misc]
    """With named arguments, and a bias by the place of a token in the sequence."""

    slope = 0.0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.slope * torch.arange(x.shape[1]).expand(x.shape[1], -1)
        mixed = F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=bias)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


def own_vit(what: str, slope: float = 0.0) -> Any:
    def run(self: Any, x: Tensor, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), what)(x, **kwargs)

    own = tiny_vit()
    if what == "instance":
        own.forward = lambda images: type(own).forward(own, images)
    elif what == "features of an instance":
        own.forward_features = MethodType(type(own).forward_features, own)
    elif what == "hook":
        own.register_forward_pre_hook(lambda module, inputs: None)
    else:
        own.__class__ = type("Own", (type(own),), {what: run})
    for block in own.blocks if what == "forward" else ():
        block.attn.__class__, block.attn.slope = OwnAttention, slope
    return own


@pytest.mark.parametrize("what", ["forward", "forward_features", "hook", "instance", "features of an instance"])
def test_a_vit_of_ones_own_is_masked_as_timms_is(what: str) -> None:
    own = own_vit(what)
    backbone = backbone_of(own)
    assert isinstance(backbone, AnyClassifier) and backbone.input_size == (32, 32) and backbone.num_patches == 64
    assert_like_twin(own, tiny_vit(), 32)


@pytest.mark.parametrize("method", ["tent", "rem"])
def test_a_forward_pass_set_on_a_vit_itself_predicts(method: str) -> None:
    own, images = tiny_vit(), images_of(32)
    own.forward = lambda images: 2 * type(own).forward(own, images.flip(-1))
    torch.testing.assert_close(predicted(pipeline_of(method, own), images), own(images).detach())


def test_a_head_set_on_a_vit_itself_reads_every_token() -> None:
    own, images = tiny_vit(), images_of(32)
    own.forward_head = lambda tokens, **_: own.head(tokens.mean(1))
    torch.testing.assert_close(predicted(pipeline_of("tent", own), images), own(images).detach())


def test_a_model_without_such_scores_is_refused_with_those_that_it_has() -> None:
    own = tiny_vit(class_token=False, global_pool="avg")
    own.register_forward_pre_hook(lambda module, inputs: None)
    with pytest.raises(ModelError, match="masking=attention; leave it out, or choose features or random"):
        backbone_of(own).check_scores("attention")


def test_the_image_is_masked_if_blocks_take_a_tokens_place_for_its_position() -> None:
    backbone = backbone_of(own_vit("forward", slope=0.1))
    assert isinstance(backbone, AnyClassifier) and backbone.input_size is None and backbone.num_patches > 1


def test_layers_of_a_model_in_training_mode_are_found_in_eval_mode() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), tiny_vit(proj_drop_rate=0.5)).train()
    before = state_sha256(model)
    assert REM(model).method.model.backbone.input_size == (32, 32) and state_sha256(model) == before


def test_gradient_checkpointing_changes_no_update_or_is_refused() -> None:
    swins, batch = [tiny("swin"), tiny("swin")], [images_of(64)]
    swins[1].set_grad_checkpointing()
    torch.testing.assert_close(*(updates(swin, batch) for swin in swins), atol=0, rtol=0)
    resnet: Any = tiny("resnet")
    resnet.set_grad_checkpointing()
    with pytest.raises(ModelError, match="ResNet cannot be adapted with gradient checkpointing; turn it off"):
        updates(resnet, batch, bn="recent")


@pytest.mark.parametrize("make", [tiny_vit, lambda: nn.Sequential(Normalise(), tiny_vit()), small])
def test_a_head_may_be_replaced(make: Any) -> None:
    model = make()
    assert model_info(model).num_classes == NUM_CLASSES
    inner = model[1] if isinstance(model, nn.Sequential) else getattr(model, "module", model)
    head = "fc" if isinstance(inner, Net) else "head"
    old: Any = inner.get_submodule(head)
    inner.set_submodule(head, nn.Linear(old.in_features, 3))
    pipeline = pipeline_of("remtta", model, method_config("remtta", {}, batch_size=4))
    assert model_info(model).num_classes == pipeline.method.model.num_classes == 3 and model_info(model).labels is None
    assert pipeline(images_of(32)[:4]).shape == (4, 3) and f"{head}.bias" in pipeline.delta()


def test_a_model_may_have_some_names_of_timms() -> None:
    model: Any = Net()
    model.get_classifier = lambda: model.fc
    assert model_info(model).num_classes == NUM_CLASSES


def test_a_model_that_folds_views_into_the_batch_is_refused_with_a_remedy() -> None:
    class Folds(Around):
        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.model(torch.cat([images, images.flip(-1)]))
            return logits.view(2, len(images), -1).mean(0)

    images = images_of(32)
    with pytest.raises(ModelError, match=r"Folds processes 12 images for a batch of 6, .* --method tent"):
        pipeline_of("rem", Folds(Net()))(images)
    for name, settings in (("rem", {"masking": "random"}), ("remtta", {"adapt_every": 2})):
        pipeline = pipeline_of(name, Folds(Net()), method_config(name, settings, batch_size=6))
        assert torch.isfinite(pipeline(images)).all()


@pytest.mark.parametrize("trace", [False, True])
def test_a_functional_net_adapts_by_its_norms_and_masks_the_image(trace: bool) -> None:
    net = small()
    if trace:
        net.module = fx.symbolic_trace(net.module)
    backbone = backbone_of(net)
    assert list(adapted_norms(backbone)) == [f"norms.{n}.{each}" for n in range(3) for each in ("weight", "bias")]
    assert (backbone.num_patches, list(backbone.classifiers), backbone.patch_size) == (8 * 8, ["fc"], (4, 4))
    pipeline = pipeline_of("remtta", net, method_config("remtta", {"lr": 0.01}, batch_size=4))
    for seed in range(2):
        pipeline(images_of(32, seed)[:4])
    norms = adapted_norms(backbone, "all")
    assert list(pipeline.delta()) == [*norms, *running_statistics(backbone.batch_norms), "fc.bias"]


def test_patches_are_of_the_size_that_is_given_and_chance_masks_where_there_is_no_map(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "remtta")
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    rem = REM(flat, REMConfig(adapt_layers="all"))
    assert (rem.method.model.backbone.num_patches, rem.method.model.backbone.patch_size) == (49, (4, 4))
    assert "patches at random are masked" in caplog.text
    before = rem.state_dict()
    rem(images_of(28))
    assert rem.method.num_updates == 1 and not torch.equal(rem.state_dict()["generator"], before["generator"])
    given = ModelWithMetadata(Net(), patch_size=(8, 16), preprocessing=Preprocessing((32, 64)))
    assert (backbone_of(given).num_patches, backbone_of(given).patch_size) == (16, (8, 16))
    scores = backbone_of(given).classify_with_scores(random_images(2, 0, 64)[:, :, :32], "features")[1]
    assert scores.shape == (2, 16)


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_without_a_bias_is_centered_all_the_same(bias: bool) -> None:
    norm, head = nn.BatchNorm2d(3), nn.Linear(3, 6, bias=bias)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([0.5, 0.2, 0.0]))
        head.weight.copy_(4 * torch.cat([torch.eye(3), -torch.eye(3)]))
    pipeline = pipeline_of("fast", nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head))  # by colour
    for seed in range(4):
        pipeline(images_of(32, seed))
    moved = ["0.running_mean", "0.running_var", *(["3.bias"] if bias else [])]
    assert pipeline.centering.offsets["adapted"].abs().max() > 0.1 and list(pipeline.delta()) == moved


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: small("dict"),
            r'returns a dict of boxes, logits, .*remtta.Adapter\(model, output=lambda o: o\["logits"\]\)',
        ),
        (lambda: small("tuple"), r"returns a tuple, not logits .*output=lambda o: o\[0\]\)"),
        (lambda: small("map"), r"returns a tensor of shape \(1, 16, .*convert the output"),
        (lambda: small("probabilities"), r"returns probabilities, .*output=lambda p: p.clamp\(min=1e-9\).log\(\)\)"),
        (
            lambda: small("dict", lambda o: o["logits"].softmax(-1)),
            r"output= selects probabilities, .*: add .clamp\(min=1e-9\).log\(\)",
        ),
        (
            lambda: ModelWithMetadata(Net(), patch_size=(0, 16)),
            r"patch_size needs \(height, width\) in pixels, got \(0, 16\)",
        ),
        (lambda: nn.Linear(2, 2), r"Linear takes no image .*remtta.Adapter\(model, preprocessing="),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
            "nothing to adapt: Sequential has no normalisation layers; the method fast",
        ),
        (
            lambda: torch.export.export(nn.Flatten(), (images_of(32),)).module(),
            "is a program of torch.jit or torch.export; give the model that it was made from",
        ),
        (lambda: small().double(), "norms.0.weight is torch.float64"),
        (lambda: tiny_vit(num_classes=0), "no classifier head"),
        (
            lambda: ModelWithMetadata(tiny_vit().half(), lambda o: 2 * o),
            "blocks.0.norm1.weight is torch.float16; adapt a",
        ),
    ],
)
def test_unsupported_models_are_refused_with_a_remedy(make: Any, told: str) -> None:
    with pytest.raises(RemttaError, match=told):
        REM(make())


@pytest.mark.parametrize(
    ("returned", "output"),
    [
        ("dict", lambda o: o["logits"]),
        ("tuple", lambda o: o[0]),
        ("probabilities", lambda p: p.clamp(min=1e-9).log()),
        ("map", lambda o: o.mean((2, 3))),
    ],
)
def test_output_selects_the_logits(returned: str, output: Any) -> None:
    pipeline, plain = pipeline_of("rem", small(returned, output)), pipeline_of("rem", small())
    for images in (images_of(32, 1), images_of(32, 2)):
        found, expected = pipeline(images), plain(images)
        if returned != "map":
            torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-4)
        assert torch.isfinite(found).all()
    assert pipeline.delta()["norms.0.weight"].any()


MODELS: dict[str, Any] = {
    "net": lambda: small("dict", lambda o: o["logits"]),
    "transformers": lambda: randomised(TRANSFORMERS["vit"]()),
}
TRIED = ("eata", "cotta", "lame", "vdp", "ecotta", "norm")


@pytest.mark.parametrize(("name", "model"), [*((name, "net") for name in TRIED), ("sar", "transformers")])
def test_methods_run_on_it(name: str, model: str) -> None:
    pipeline = pipeline_of(name, MODELS[model](), method_config(name, QUICK.get(name, {}), batch_size=6))
    images = images_of(32)
    if pipeline.method.needs_source_data:
        method = learner(pipeline.method)
        method.use_source(method.learn_source([images]))
    assert torch.isfinite(pipeline(images)).all() and torch.isfinite(pipeline(images)).all()
    pipeline.reset()
    assert pipeline.method.model.num_classes == NUM_CLASSES


@pytest.mark.parametrize("of", ["timm", "its own"])
def test_convolutions_of_known_libraries_see_channels_last_images_on_a_cpu(of: str) -> None:
    model = tiny("efficientnet") if of == "timm" else nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Viewing())
    layer, seen = next(each for each in model.modules() if isinstance(each, nn.Conv2d)), []
    images = random_images(2, 0, 64)
    expected = model.eval()(images)
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    torch.testing.assert_close(backbone_of(model).logits(images), expected)
    assert seen[-1].is_contiguous(memory_format=torch.channels_last) == (of == "timm")


class Viewing(nn.Module):
    """A head that takes maps only in the usual format."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4 * 62 * 62, NUM_CLASSES)

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.head(maps.view(len(maps), -1))
        return logits


def test_its_blocks_are_not_compiled() -> None:
    with pytest.raises(ModelError, match="Net is in no family whose blocks remtta can compile"):
        compile_blocks(Net())


def test_traces_do_not_keep_models_alive() -> None:
    model = Net()
    assert backbone_of(model).blocks
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
