from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from remtta import Delta, load_base, load_model
from remtta.deltas.delta import check_base, checkpoint_state
from remtta.errors import CheckpointError, DeltaError, DownloadError, ModelError, UsageError
from remtta.lab.heads import restricted_classes
from remtta.methods.table import method_config
from remtta.models.preprocessing import preprocessing_of
from remtta.models.tensor_files import state_sha256
from remtta.zero_shot.classifier import zero_shot_head
from remtta.zero_shot.prompts import TEMPLATES
from remtta.zero_shot.text_tower import TextTower
from tests.conftest import raising, random_images
from tests.methods.making import pipeline_of, predicted
from tests.zero_shot.tiny_clip import NAMES, TEXT, VISION, tiny_clip

TIMM = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
SIGLIP = {"timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none", "image_size": 160}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64}


def plain_logits(own: Any, images: Tensor, names: list[str], templates: tuple[str, ...]) -> Tensor:
    """Return open_clip's own logits, class by class."""
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    means = [own.encode_text(tokenizer([t.format(n) for t in templates]), normalize=True).mean(0) for n in names]
    logits: Tensor = (
        own.logit_scale.exp() * own.encode_image(images, normalize=True) @ F.normalize(torch.stack(means)).T
    )
    return logits if own.logit_bias is None else logits.add(own.logit_bias)


@pytest.mark.parametrize(
    ("vision", "changes"),
    [
        ({}, {}),
        ({"no_ln_pre": True, "pool_type": "avg", "ls_init_value": 0.5}, {"quick_gelu": True}),
        ({"final_ln_after_pool": True, "pool_type": "avg"}, {"init_logit_bias": -3.0}),
        ({"act_kwargs": {"approximate": "tanh"}}, {}),
        (TIMM, {"custom_text": True}),
        (SIGLIP, {"custom_text": True, "embed_dim": 96, "init_logit_bias": -10.0}),
        (RESNET, {}),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_open_clip(tmp_path: Path, vision: dict[str, Any], changes: dict[str, Any]) -> None:
    whole = vision in (TIMM, SIGLIP, RESNET)
    name, own = tiny_clip(tmp_path / "model", vision if whole else {**VISION, **vision}, **changes)
    model = load_model(name, labels=NAMES, prompts="openai7")
    written, kept = checkpoint_state(model), own.state_dict()
    assert written.keys() == kept.keys() and all(torch.equal(written[each], kept[each]) for each in kept)
    images = random_images(3, size=preprocessing_of(model).input_size[0])
    expected = plain_logits(own, images, NAMES, TEMPLATES["openai7"])
    torch.testing.assert_close(pipeline_of("source", model)(images), expected, rtol=0, atol=1e-5)
    own_statistics = {"bn": "running"} if vision is RESNET else {}  # batch norms go by the batch while it adapts
    rem = pipeline_of("rem", model, method_config("rem", {"lr": 0.01, **own_statistics}, batch_size=3))
    torch.testing.assert_close(rem(images), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(predicted(rem, images), expected, rtol=0, atol=1e-4)


def test_preprocessing_and_labels_are_the_models_and_a_checkpoint_works_offline(tmp_path: Path) -> None:
    name, own = tiny_clip(tmp_path / "model")
    model = load_model(name, labels=NAMES, crop_pct=0.9)
    inputs = preprocessing_of(model)
    assert (inputs.std, inputs.interpolation) == ((0.25,) * 3, "bilinear")
    assert (inputs.crop_mode, inputs.crop_pct) == ("squash", 0.9)
    torch.save({"state_dict": {f"module.{k}": v + 1 for k, v in own.state_dict().items()}}, tmp_path / "other.pt")
    other: Any = load_model(name, labels=NAMES, checkpoint=tmp_path / "other.pt")
    assert torch.equal(other.cls_token.flatten(), own.visual.class_embedding + 1)
    torch.save({"logit_scale": torch.zeros(())}, tmp_path / "part.pt")
    with pytest.raises(
        CheckpointError,
        match=r"does not fit the model: only 1 of the model's 86 tensors are in it, .*; missing in the file",
    ):
        load_model(name, labels=NAMES, checkpoint=tmp_path / "part.pt")


def test_texts_are_embedded_once_in_batches_and_kept_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMTTA_CACHE", str(tmp_path / "cache"))
    name, _ = tiny_clip(tmp_path / "model")
    told: list[tuple[int, int]] = []
    many = [f"thing {number}" for number in range(40)]
    first: Any = load_model(
        name, labels=many, prompts="openai7", on_texts=lambda done, total: told.append((done, total))
    )
    assert told == [(252, 280), (280, 280)]
    with monkeypatch.context() as patch:
        patch.setattr(TextTower, "encode", None)  # not asked again
        again: Any = load_model(name, labels=many, prompts="openai7")
    assert torch.equal(first.head.embeddings, again.head.embeddings)
    cache = tmp_path / "cache" / "text-embeddings"
    (damaged,) = cache.iterdir()
    damaged.write_bytes(b"nothing")
    load_model(name, labels=many, prompts="openai7")
    load_model(name, labels=many[::-1], prompts="openai7")
    assert len(list(cache.iterdir())) == 2
    quick: Any = load_model(tiny_clip(tmp_path / "quick", quick_gelu=True)[0], labels=many, prompts="openai7")
    assert quick.head.texts.tower.sha256 == first.head.texts.tower.sha256
    assert not torch.equal(quick.head.embeddings, first.head.embeddings)  # equal weights, other activations


def test_names_and_templates_are_part_of_a_deltas_base_and_rebuild_it(tmp_path: Path) -> None:
    name, _ = tiny_clip(tmp_path / "model")
    (tmp_path / "mine.txt").write_text("this is a {}\n\na {} again\n")
    model: Any = load_model(name, labels=NAMES, prompts=str(tmp_path / "mine.txt"))
    hashes = {state_sha256(load_model(name, labels=NAMES)), state_sha256(load_model(name, labels=NAMES[::-1]))}
    assert len(hashes | {state_sha256(model)}) == 3
    origin = dict(model.pretrained_cfg["built_from"])
    delta = Delta({}, origin.pop("name"), state_sha256(model), "rem", model_options=origin)
    assert state_sha256(load_base(delta)) == delta.base_sha256
    with pytest.raises(DeltaError, match="adapted from, with the same labels, prompts, input size and model arguments"):
        check_base(delta, "")
    read = Delta({}, name, "", "rem", model_options={**origin, "prompts": str(tmp_path / "mine.txt")}, path="d")
    with pytest.raises(UsageError, match="which a file may not set; name it with --prompts"):
        load_base(read, name=name)


@pytest.mark.parametrize("vision", [VISION, RESNET])
@torch.no_grad()
def test_classes_can_be_restricted_and_come_back(tmp_path: Path, vision: dict[str, Any]) -> None:
    model: Any = load_model(tiny_clip(tmp_path / "model", vision)[0], labels=NAMES)
    images = random_images(2, size=vision["image_size"])
    whole = model(images)
    with restricted_classes(model, [3, 1]):
        torch.testing.assert_close(model(images), whole[:, [3, 1]])
        assert zero_shot_head(model).texts.names == ("ship", "dog")
    assert torch.equal(model(images), whole) and len(zero_shot_head(model).texts.names) == len(NAMES)


def test_invalid_zero_shot_models_are_refused_in_one_line(tmp_path: Path) -> None:
    name, _ = tiny_clip(tmp_path / "model")
    coca, _ = tiny_clip(tmp_path / "coca", {**VISION, "attentional_pool": True, "attn_pooler_heads": 2})
    (tmp_path / "bad.txt").write_text("no place\n")
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("clip:ViT-Q", {}, 'unknown model "clip:ViT-Q"'),
        ("clip:ViT-B-16", {}, "needs weights: name them (clip:NAME/WEIGHTS) or give --checkpoint; open_clip has"),
        ("clip:ViT-B-16/other", {}, "needs weights: name them"),
        (name, {"num_classes": 3}, "takes no --num-classes"),
        (name, {"prompts": "none"}, 'unknown prompts "none"; choose single, openai7, openai80, watt'),
        (name, {"prompts": str(tmp_path / "bad.txt")}, 'needs one {} for the class\'s name, got "no place"'),
        (coca, {}, "as CoCa does"),
        (name, {"labels": ["cat", " ", "dog"]}, "class 1 has a blank line instead of a name"),
        (
            "vit_tiny_patch16_224",
            {"prompts": "watt"},
            "only for clip:NAME/WEIGHTS, and the model is vit_tiny",
        ),
    ]
    for model, given, message in refused:
        with pytest.raises(UsageError) as caught:
            load_model(model, **{"labels": NAMES, **given})
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    own, place, ran = {"trust_remote_code": True}, tmp_path / "model", tmp_path / "ran"
    name, _ = tiny_clip(place, text_cfg={**TEXT, "hf_tokenizer_name": "own", "tokenizer_kwargs": own})
    (place / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    (place / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.T", "own.T"]}}')
    with pytest.raises(ModelError, match=" could not be built: "):
        load_model(name, labels=NAMES)
    assert not ran.exists()


def test_without_a_network_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("open_clip.factory.download_pretrained", raising(OSError("no route\nto host")))
    with pytest.raises(DownloadError) as caught:
        load_model("clip:ViT-B-32/openai", labels=NAMES)
    assert "or give --checkpoint (Failed to download weights" in str(caught.value) and "\n" not in str(caught.value)
