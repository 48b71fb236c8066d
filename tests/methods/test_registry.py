from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remtta.baselines.continual_mae import hog_size
from remtta.methods.optimizer import NamedOptimizer
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.methods.tent import TentConfig
from remtta.zero_shot import METHODS as ZERO_SHOT
from tests.conftest import random_images, tiny_vit
from tests.methods.making import (
    LABELS,
    check_inference_mode,
    check_prediction,
    check_reset,
    check_state,
    come_of,
    descend,
    entropies,
    make,
    norms,
    pipeline_of,
    predicted,
    run,
)

WEIGHTS = sum(parameter.numel() for parameter in tiny_vit().parameters())
KINDS = [
    "source",
    "neo",
    "tent",
    "rem",
    "sar",
    "roid",
    "cotta",
    "vida",
    "memo",
    "foa",
    "vdp",
    "becotta",
    "zerosiam",
    "spa",
    "rotta",
]
"""One method of each way to predict and to learn."""
BY_IMAGE = ["eata", "deyo", "rem", "cotta", "vida", "continual-mae", "becotta", "lame", "neo", "zerosiam"]
"""One of each way to go through a batch in parts."""
AUGMENTED = {"augment_below": 1.0, "num_augmentations": 3, "restore": 0.1}

KEEP_AS_ANOTHER = ("remtta", "light", "fast", "eta", "rem-n1", "pseudo-label", "supervised")
# norm needs batch norms
ON_VITS = [name for name in METHOD_TABLE if name not in ("norm", *KEEP_AS_ANOTHER, *ZERO_SHOT)]


def _confident(logits: Tensor) -> Tensor:
    probs = logits.detach().softmax(-1)
    chosen = [row for row in range(len(logits)) if probs[row].max() > 0.42]
    assert 0 < len(chosen) < len(logits)  # so that the filter matters
    terms = [-logits[row].log_softmax(-1)[probs[row].argmax()] for row in chosen]
    return torch.stack(terms).sum() / len(chosen)


def _labelled(logits: Tensor) -> Tensor:
    return -logits.log_softmax(-1)[torch.arange(5), LABELS].mean()


@pytest.mark.parametrize(
    ("name", "settings", "loss"),
    [
        ("tent", {"lr": 0.05}, lambda logits: entropies(logits).mean()),
        ("tent-come", {"lr": 0.05}, lambda logits: torch.stack([come_of(row) for row in logits]).mean()),
        ("pseudo-label", {"threshold": 0.42, "lr": 0.02}, _confident),
        ("supervised", {"lr": 0.05, "optimizer": "sgd", "adapt_layers": "all"}, _labelled),
    ],
)
def test_three_updates_equal_a_plain_loop(
    name: str, settings: dict[str, Any], loss: Callable[[Tensor], Tensor]
) -> None:
    pipeline = pipeline_of(name, tiny_vit(), method_config(name, settings, batch_size=5))
    plain = tiny_vit()
    learned = norms(plain)
    optimizer = torch.optim.SGD(learned, lr=settings["lr"], momentum=0.9)
    for seed in range(3):
        logits = plain(random_images(5, seed))
        torch.testing.assert_close(run(pipeline, seed), logits.detach())
        descend(optimizer, loss(logits))
    assert len(pipeline.method.model.weights.parameters) == len(learned)


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in BY_IMAGE), ("cotta", AUGMENTED)])
def test_micro_batches_give_the_same_update(name: str, settings: dict[str, Any]) -> None:
    whole, parts = make(name, **settings), make(name, micro_batch=2, **settings)
    for seed in range(2):
        torch.testing.assert_close(run(whole, seed), run(parts, seed))
    assert whole.method.num_updates > 0 or not whole.method.adapts
    torch.testing.assert_close(parts.delta(), whole.delta())


@pytest.mark.parametrize("name", ON_VITS)
def test_a_method_continues_from_its_state_as_if_it_had_not_stopped(name: str) -> None:
    check_state(name)


@pytest.mark.parametrize("name", KINDS)
def test_predicting_changes_nothing_and_equals_the_next_prediction(name: str) -> None:
    check_prediction(name)


@pytest.mark.parametrize(
    "name", ["rem", "sar", "cotta", "foa", "vdp", "becotta", "petal", "cmf", "continual-mae", "neo", "spa", "rotta"]
)
def test_a_batch_of_one_and_a_reset(name: str) -> None:
    check_reset(name)


@pytest.mark.parametrize("name", ["rem", "cotta", "spa", "rotta"])
def test_a_caller_in_inference_mode_changes_nothing(name: str) -> None:
    check_inference_mode(name)


@pytest.mark.parametrize("name", ["rem", "roid", "memo", "cotta", "vdp", "spa", "rotta"])
def test_the_gradients_of_images_are_the_callers(name: str) -> None:
    pipeline, plain = make(name), make(name)
    leaf = random_images(5).requires_grad_()
    images = leaf * 1.0
    for _ in range(2):
        assert torch.equal(pipeline(images), plain(leaf.detach()))
    assert leaf.grad is None
    images.sum().backward()


@pytest.mark.parametrize("name", ["rem", "cotta", "spa", "neo"])
def test_bf16_is_near_and_gives_float32(name: str) -> None:
    exact, fast = make(name), make(name, precision="bf16")
    for seed in range(2):  # the second is after an update
        logits = run(fast, seed)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.softmax(-1), run(exact, seed).softmax(-1), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("source", "rem", "sar", "roid", "memo", "foa", "becotta", "lame", "supervised")),
        *((name, {}) for name in ("neo", "zerosiam", "spa", "rotta")),
        ("cotta", {**AUGMENTED, "steps": 2, "micro_batch": 2}),
        ("petal", AUGMENTED),
        ("vida", {"lr": 0.05, "adapter_lr": 0.05}),
        ("rem", {"masking": "random", "episodic": True}),
        ("rem", {"mask_ratios": (0.0, 0.4), "ranking_weight": 0.0}),  # no image violates an order
        ("rem", {"margin": 0.05, "micro_batch": 3}),
        *(("tent", {"steps": 3, "prediction_step": "last", "episodic": episodic}) for episodic in (False, True)),
    ],
)
def test_predicting_as_early_as_possible_comes_to_the_same(name: str, settings: dict[str, Any]) -> None:
    together, apart = make(name, **settings), make(name, **settings)
    for seed in range(2):
        with torch.inference_mode():
            logits = apart.predict(random_images(5, seed), latency=True).logits
        torch.testing.assert_close(logits, run(together, seed))
        apart.learn(LABELS)
        apart.learn(LABELS)  # once is enough
    assert apart.method.num_updates == together.method.num_updates
    torch.testing.assert_close(apart.delta(), together.delta())


@pytest.mark.parametrize("name", ["tent", "rem", "cotta"])
def test_the_answer_is_the_first_steps_or_the_last_ones(name: str) -> None:
    first, last, single = make(name, steps=3), make(name, steps=3, prediction_step="last"), make(name)
    by_steps = [run(single, 0) for _ in range(3)]
    assert torch.equal(run(first, 0), by_steps[0])
    assert torch.equal(run(last, 0), by_steps[2])
    assert last.method.last_views is not None and single.method.last_views is not None
    assert torch.equal(last.method.last_views, single.method.last_views)
    assert first.method.num_updates == last.method.num_updates == single.method.num_updates > 0
    assert torch.equal(predicted(first, random_images(5, 1)), predicted(single, random_images(5, 1)))
    assert torch.equal(run(make(name, steps=1, prediction_step="last"), 0), run(make(name), 0))


@pytest.mark.parametrize("settings", [{"episodic": True}, {"steps": 2}])
def test_rem_uses_the_predictions_forward_pass_again(settings: dict[str, Any]) -> None:
    together, apart = make("rem", **settings), make("rem", **settings)
    passes: list[int] = []
    head: Any = apart.method.model.model.head
    head.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    for seed in range(2):
        torch.testing.assert_close(apart.predict(random_images(5, seed), latency=True).logits, run(together, seed))
        passes.clear()
        apart.learn()
        masked, plain = 2 * 5, 5  # and those of the plain view that violate the order, once more
        assert masked <= sum(passes) - (settings.get("steps", 1) - 1) * (masked + plain) <= masked + plain
    torch.testing.assert_close(apart.delta(), together.delta())


@pytest.mark.parametrize(
    ("name", "settings"), [("rem", {}), ("cotta", {"teacher_decay": 0.5, "restore": 0.0, "augment_below": 0.0})]
)
def test_a_prediction_that_a_reset_came_after_is_not_learned_from(name: str, settings: dict[str, Any]) -> None:
    pipeline = make(name, lr=0.1, **settings)
    run(pipeline, 0)
    pipeline.predict(random_images(5, 1))
    pipeline.reset()
    pipeline.learn()
    fresh = make(name, lr=0.1, **settings)
    torch.testing.assert_close(run(pipeline, 1), run(fresh, 1))
    torch.testing.assert_close(pipeline.delta(), fresh.delta())


def test_neither_an_update_nor_a_reset_leaves_gradients() -> None:
    model = tiny_vit()
    tent = pipeline_of("tent", model, TentConfig(lr=0.01))
    tent.predict(random_images(4))  # computes the gradients as well
    assert any(parameter.grad is not None for parameter in model.parameters())
    tent.reset()
    assert all(parameter.grad is None for parameter in model.parameters())
    run(tent, 0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lame", 0),
        ("vdp", 2 * 3 * 8 * 8),  # two squares of a quarter of the side
        ("foa", 3 * 48),
        ("cotta", WEIGHTS),
        ("memo", WEIGHTS),
        ("vida", WEIGHTS + 2 * (1 + 8) * ((48 + 144) + (48 + 48))),  # ranks 1 and 8, at qkv and proj of two blocks
        (
            "continual-mae",
            WEIGHTS - 66 * 48 + 48 + (48 + 1) * hog_size((4, 4)),
        ),  # the mask token, a layer to histograms
    ],
)
def test_a_method_says_how_many_numbers_it_learns(name: str, count: int) -> None:
    assert make(name).method.num_trained == count


def test_learning_from_labels_needs_labels() -> None:
    with pytest.raises(ValueError, match="learns from labels"):
        pipeline_of("supervised", tiny_vit())(random_images(2))


@pytest.mark.parametrize("name", ["rem", "sar", "cmf"])
def test_a_step_with_the_anchor_is_the_step_and_then_a_share_of_the_way_back(name: str) -> None:
    images = random_images(8)
    plain, pulled = tiny_vit(), tiny_vit()
    filters = {"entropy_margin": 5.0} if name == "sar" else {}
    for model, anchor in ((plain, 0.0), (pulled, 0.25)):
        pipeline = pipeline_of(
            name, model, method_config(name, {"lr": 0.01, "anchor": anchor, **filters}, batch_size=8)
        )
        pipeline(images)
        assert pipeline.method.num_updates == 1
    source, moved = dict(tiny_vit().named_parameters()), 0.0
    for (key, parameter), (_, other) in zip(pulled.named_parameters(), plain.named_parameters(), strict=True):
        expected = other + 0.25 * (source[key] - other)  # theta + a (theta_0 - theta)
        assert torch.allclose(parameter, expected, atol=1e-6), key
        moved += float((parameter - source[key]).detach().abs().sum())
    assert moved > 0


UNWATCHED = ["rem", "rem-n1", "tent"]


@pytest.mark.parametrize("name", UNWATCHED)
def test_a_step_reads_only_whether_its_gradients_are_finite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[NamedOptimizer] = []

    def read(optimizer: NamedOptimizer) -> bool:
        reads.append(optimizer)
        return True

    monkeypatch.setattr(NamedOptimizer, "has_finite_gradients", read)
    pipeline = pipeline_of(name, tiny_vit().to("meta"))  # nothing can be read from this device
    pipeline(random_images(4).to("meta"))
    assert len(reads) == 1 and pipeline.method.num_updates == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", UNWATCHED)
def test_nothing_else_of_a_step_waits_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = tiny_vit().cuda()
    pipeline, images = pipeline_of(name, model), random_images(4).cuda()
    pipeline(images)  # sets up what PyTorch sets up at the first call
    monkeypatch.setattr(NamedOptimizer, "has_finite_gradients", lambda self: True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipeline(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pipeline.method.num_updates == 2


OTHERWISE_ON_A_GPU = ("continual-mae", "becotta", "ecotta", "rotta")  # other random numbers; convolutions in TF32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in ON_VITS if name not in OTHERWISE_ON_A_GPU])
def test_a_method_on_a_gpu_agrees_with_the_cpu(name: str) -> None:
    here, there = make(name), make(name, "cuda")
    for seed in range(3):
        torch.testing.assert_close(run(there, seed).cpu(), run(here, seed), atol=1e-4, rtol=1e-4)
