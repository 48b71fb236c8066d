"""Every family of transformers, tiny and random: timm's own logits, exact masks, and what adapts."""

import copy
import math
from typing import Any

import peft
import pytest
import timm
import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from torch import Tensor

from remtta import REM, REMConfig
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.backbones.tokens import Transformer
from remtta.backbones.vit import ViT
from remtta.errors import ModelError
from remtta.methods.table import method_config
from tests.backbones.tiny_models import SMALL, TRANSFORMERS, image_size, images_for, transformer
from tests.conftest import TINY, random_images, tiny_vit
from tests.methods.making import QUICK, pipeline_of, predicted, views_of

NO_ATTENTION = {"average pool", "largest values", "refined pool"}
POOLED = {name for name in TRANSFORMERS if "attention pool" in name or name.startswith("pool ")}
DYNAMIC = {name for name in TRANSFORMERS if name.startswith(("any size", "DINOv3"))}
EACH_FAMILY = ["DINOv2 with registers", "attention pool", "DINOv3", "BEiT"]
every_model = pytest.mark.parametrize("name", TRANSFORMERS)


@every_model
def test_the_plain_view_has_timms_own_logits(name: str) -> None:
    model, images = transformer(name), images_for(name)
    backbone = backbone_of(model)
    with torch.no_grad():
        expected = model(images)
        embedded = backbone.embed(images)
        assert backbone.count_patches(embedded) == backbone.num_patches and backbone.num_passing > 0
        assert set(adapted_norms(backbone)) == norms_of(model, 1)
        assert backbone.input_size == (None if name in DYNAMIC else image_size(name))
        everything = torch.arange(backbone.num_patches).expand(len(images), -1)
        for logits in (
            backbone.logits(images),
            backbone.classify(embedded, everything),
            backbone.classify_with_features(images)[0],
            backbone.classify_with_scores(embedded, "features")[0],
        ):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert float(expected.std()) > 1e-3


def written_out(model: Any, images: Tensor, kept: Tensor) -> Tensor:
    """Masked logits image by image: timm's own blocks, on these tokens with their own positions."""
    return torch.cat(
        [_one_written_out(model, image.unsqueeze(0), row) for image, row in zip(images, kept, strict=True)]
    )


def _one_written_out(model: Any, image: Tensor, kept: Tensor) -> Tensor:
    prefix, depth = model.num_prefix_tokens, len(model.blocks)
    stay = torch.cat([torch.arange(prefix), prefix + kept])
    if isinstance(model, Beit):
        return _beit_written_out(model, image, stay)
    if isinstance(model, Eva):
        tokens, rope = model._pos_embed(model.patch_embed(image))
        tokens = model.norm_pre(tokens)
    else:
        tokens, rope = model.norm_pre(model._pos_embed(model.patch_embed(image))), None
    tokens = tokens[:, stay]
    for number in range(depth):
        if rope is None:
            tokens = model.blocks[number](tokens)
        else:
            own = rope[number] if rope.ndim == 4 else rope
            tokens = model.blocks[number](tokens, rope=own[..., kept, :])
    logits: Tensor = model.forward_head(model.norm(tokens))
    return logits


def _beit_written_out(beit: Any, image: Tensor, stay: Tensor) -> Tensor:
    tokens = torch.cat([beit.cls_token, beit.patch_embed(image)], dim=1)
    tokens = (tokens if beit.pos_embed is None else tokens + beit.pos_embed)[:, stay]
    shared = None if beit.rel_pos_bias is None else beit.rel_pos_bias()[:, stay][:, :, stay]
    for block in beit.blocks:
        if block.attn.relative_position_bias_table is not None:
            own = block.attn._get_rel_pos_bias()[:, :, stay][:, :, :, stay]
            block.attn._get_rel_pos_bias = lambda own=own: own
        tokens = block(tokens, shared_rel_pos_bias=shared)
        vars(block.attn).pop("_get_rel_pos_bias", None)
    logits: Tensor = beit.forward_head(beit.norm(tokens))
    return logits


def some_masks(count: int, patches: int, keep: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(patches, generator=generator)[:keep].sort().values for _ in range(count)])


@every_model
def test_a_masked_view_is_timms_own_blocks_on_the_tokens_kept(name: str) -> None:
    model, images = transformer(name), images_for(name)
    backbone = backbone_of(model)
    kept = some_masks(len(images), backbone.num_patches, keep=11)
    with torch.no_grad():
        masked = backbone.classify(backbone.embed(images), kept)
        torch.testing.assert_close(masked, written_out(model, images, kept), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(masked, backbone.logits(images), atol=1e-4)
        for block in model.blocks if isinstance(model, Beit) else ():
            block.attn.fused_attn = False
        torch.testing.assert_close(backbone.classify(backbone.embed(images), kept), masked, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(DYNAMIC))
def test_images_of_another_shape_keep_the_positions_of_their_own_grid(name: str) -> None:
    model = transformer(name)
    backbone, images = backbone_of(model), torch.randn(2, 3, 5 * 8, 3 * 8)
    assert backbone.input_size is None
    kept = some_masks(2, 15, keep=9)
    with torch.no_grad():
        embedded = backbone.embed(images)
        assert backbone.count_patches(embedded) == 15
        torch.testing.assert_close(backbone.classify(embedded), model(images), atol=1e-5, rtol=1e-5)
        expected = written_out(model, images, kept)
        torch.testing.assert_close(backbone.classify(embedded, kept), expected, atol=1e-5, rtol=1e-5)


def last_row(model: Any, images: Tensor) -> Tensor:
    """The class token's row (B, T) of the last block's attention maps, as timm writes them out, summed over heads."""
    block, maps = copy.deepcopy(model).blocks[-1], list[Tensor]()
    for layer in block.modules():
        layer.fused_attn = False
        if hasattr(layer, "attn_drop"):
            layer.attn_drop.register_forward_hook(lambda module, inputs, output: maps.append(output))
    inputs: list[Any] = []
    with model.blocks[-1].register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
    ):
        model(images)
    block(*inputs[0][0], **inputs[0][1])
    return torch.stack([each[:, :, 0].sum(1) for each in maps]).sum(0)


def pool_map(model: Any, images: Tensor) -> Tensor:
    """Return the attention of the pool (B, patches), computed head by head."""
    tokens, pool = model.forward_features(images), model.attn_pool
    prefix = model.num_prefix_tokens
    skip = 0 if isinstance(model, Eva) or model.pool_include_prefix else prefix
    keys = pool.kv(tokens[:, skip:])[..., : pool.kv.in_features]
    queries, total = pool.q(pool.latent[0]), torch.zeros(())
    for head in range(pool.num_heads):
        part = slice(head * pool.head_dim, (head + 1) * pool.head_dim)
        scores = (keys[..., part] * queries[:, part]).sum(-1) / math.sqrt(pool.head_dim)
        total = total + scores.exp() / scores.exp().sum(-1, keepdim=True)
    return total[:, prefix - skip :]


@every_model
def test_patches_are_ranked_by_what_the_model_attends_to_or_else_by_their_features(name: str) -> None:
    model, images = transformer(name), images_for(name)
    backbone, prefix = backbone_of(model), model.num_prefix_tokens
    with torch.no_grad():
        strengths: list[Tensor] = []
        with model.blocks[-1].register_forward_pre_hook(lambda _, inputs: strengths.append(inputs[0])):
            model(images)
        scores = backbone.classify_with_scores(backbone.embed(images), "features")[1]
        torch.testing.assert_close(scores, strengths[0][:, prefix:].norm(dim=-1))
        if name in NO_ATTENTION:
            with pytest.raises(ModelError):
                backbone.check_scores("attention")
        else:
            backbone.check_scores("attention")
            logits, attention = backbone.classify_with_scores(backbone.embed(images), "attention")
            torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=1e-5)
            pooled = name in POOLED
            expected = pool_map(model, images) if pooled else last_row(model, images)[:, prefix:]
            torch.testing.assert_close(attention, expected, atol=1e-5, rtol=1e-4)
            scores = attention
    shown = views_of(REM(model, REMConfig((0.0, 0.25))), images)[1][0]  # by what suits the model
    fewest = int(0.75 * backbone.num_patches)
    assert torch.equal(shown, scores.topk(fewest, largest=False).indices.sort(dim=1).values)


def norms_of(model: Any, blocks: int) -> set[str]:
    """Weights of norms in the first blocks; norms alone have an eps."""
    modules = dict(model.named_modules())
    return {
        name
        for name, _ in model.named_parameters()
        if name.split(".")[0] == "blocks" and int(name.split(".")[1]) < blocks
        if hasattr(modules[name.rpartition(".")[0]], "eps")
    }


@pytest.mark.parametrize("name", ["EVA-02, apart", "hybrid", "hybrid with batch norms", "norm before"])
def test_all_norms_are_those_of_the_stem_the_blocks_and_the_head(name: str) -> None:
    model = transformer(name)
    chosen = {part.rpartition(".")[0] for part in adapted_norms(backbone_of(model), "all")}
    if name == "EVA-02, apart":
        inner = {f"blocks.0.{part}" for part in ("attn.q_norm", "attn.k_norm", "mlp.norm")}
        assert inner <= chosen  # the last one is inside the SwiGLU
    if "hybrid" in name:
        assert backbone_of(model).patch_size == ((8, 8) if name == "hybrid" else (16, 16))
        assert any(part.startswith("patch_embed.backbone") for part in chosen)
    assert chosen & {"norm", "fc_norm"} and ("norm_pre" in chosen) == (name == "norm before")


@pytest.mark.parametrize(
    ("name", "method"), [(name, ("vida", "continual-mae")[number % 2]) for number, name in enumerate(EACH_FAMILY)]
)
def test_methods_that_reach_in_between_the_blocks_take_every_family(name: str, method: str) -> None:
    config = method_config(method, QUICK.get(method, {}), batch_size=3)
    adapted = pipeline_of(method, transformer(name), config)
    before = predicted(adapted, images_for(name))
    for seed in (1, 2):
        assert torch.isfinite(adapted(images_for(name, seed=seed))).all()
    assert not torch.equal(predicted(adapted, images_for(name)), before)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_method_that_adds_tokens_needs_blocks_that_take_nothing_else(name: str) -> None:
    backbone = backbone_of(transformer(name))
    assert isinstance(backbone, Transformer)
    if name == "DINOv2 with registers":
        pipeline_of("foa", transformer(name), method_config("foa", {}, batch_size=3))
        return
    plain = isinstance(backbone, ViT)
    told = (
        "reads other tokens" if plain else f"blocks of {type(backbone.module).__name__} need a position for each token"
    )
    with pytest.raises(ModelError, match=told):
        pipeline_of("foa", transformer(name), method_config("foa", {}, batch_size=3))


def test_what_cannot_be_masked_is_refused_in_a_line() -> None:
    with pytest.raises(ModelError, match="pools no tokens"):
        backbone_of(timm.create_model("eva02_small_patch14_336", **SMALL, global_pool=""))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("vit_tiny_patch16_224", {"reg_tokens": 4}, 1),
        ("deit_tiny_distilled_patch16_224", {}, 2),
        ("vit_tiny_patch16_224", {"global_pool": "map"}, None),
    ],
)
def test_only_tokens_the_classifier_reads_are_computed_in_the_last_block(
    name: str, changes: dict[str, Any], expected: int | None
) -> None:
    vit: Any = timm.create_model(name, **{**TINY, **changes}).eval()
    backbone = ViT(vit)
    assert backbone.num_tokens_read == expected
    seen = []
    vit.blocks[-1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    with torch.no_grad():
        torch.testing.assert_close(backbone.logits(random_images(2)), vit(random_images(2)))
    everything = vit.num_prefix_tokens + 64
    assert seen == [expected or everything, everything]


LORA = peft.LoraConfig(target_modules=["qkv"], r=2, init_lora_weights=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda vit: peft.get_peft_model(vit, LORA).eval(),
        lambda vit: vit.blocks[-1].attn.register_forward_hook(lambda attn, inputs, output: 2 * output),
        lambda vit: setattr(vit.blocks[-1], "forward", vit.blocks[0].forward),
    ],
)
def test_a_last_block_with_layers_of_ones_own_runs_as_it_is(change: Any) -> None:
    vit, images = tiny_vit(), random_images(2)
    before = vit(images)
    change(vit)
    backbone = ViT(vit)
    for logits in backbone.logits(images), backbone.classify_with_scores(backbone.embed(images), "attention")[0]:
        torch.testing.assert_close(logits, vit(images))
        assert not torch.allclose(logits, before, atol=1e-3)


def test_logits_carry_gradients_and_the_attention_none() -> None:
    backbone = ViT(tiny_vit(depth=2))
    logits, cls_attn = backbone.classify_with_scores(backbone.embed(random_images(2)), "attention")
    assert logits.requires_grad
    assert not cls_attn.requires_grad
