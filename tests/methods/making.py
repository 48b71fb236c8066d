"""Set up methods, and compute parts of the plain readings that they are compared with."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from remtta.baselines.source_statistics import SourceStatistics
from remtta.methods.base import Method
from remtta.methods.build import build_method, create_method
from remtta.methods.rem import REM
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import NUM_CLASSES, random_images, tiny_vit


def pipeline_of(
    method: str | type[Method[Any]], model: nn.Module, config: MethodConfig | None = None, source: Iterable[Tensor] = ()
) -> Pipeline:
    """Set up a method, by its name or class, by default with its default settings; it learns from source batches."""
    if isinstance(method, str):
        built: Method[Any] = build_method(method, model, config)
    else:
        built = create_method(method, model, config or method.settings())
    if batches := list(source):
        learner(built).use_source(learner(built).learn_source(batches))
    return Pipeline(built)


def learner(method: Method[Any]) -> SourceStatistics[Any]:
    """Return a method that learns from source images."""
    assert isinstance(method, SourceStatistics)
    return method


def predicted(pipeline: Pipeline, images: Tensor) -> Tensor:
    """Return logits (B, C) of images that change nothing."""
    return pipeline.predict(images, torch.zeros(len(images), dtype=torch.bool)).logits


def views_of(pipeline: Pipeline, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return REM's views (L, B, C) of images, and the patches (B, K) that each masked one keeps."""
    assert isinstance(pipeline.method, REM)
    return pipeline.method.views(images)


def vivid_vit(scale: float) -> Any:
    """Return the tiny ViT with predictions from nearly certain to nearly uniform."""
    model: Any = tiny_vit(depth=4)
    with torch.no_grad():
        model.head.weight.mul_(scale)
    return model


def norms(*roots: nn.Module) -> list[nn.Parameter]:
    """Return weights and biases of all LayerNorms, which are to learn."""
    found = [p for root in roots for m in root.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    for parameter in found:
        parameter.requires_grad_(True)
    return found


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def entropies(logits: Tensor) -> Tensor:
    """Return the entropy of each prediction, in nats."""
    probs = logits.softmax(-1)
    return -(probs * probs.log()).sum(-1)


def come_of(logits: Tensor) -> Tensor:
    """From the Dirichlet's parameters e^z + 1: belief e^z / S, uncertainty C / S, S their sum."""
    logits = logits / logits.norm() * logits.norm().detach()
    evidence = logits.exp()
    strength = (evidence + 1).sum()
    masses = torch.cat([evidence, torch.tensor([float(NUM_CLASSES)])]) / strength
    return -(masses * masses.log()).sum()


def symmetric(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean of both cross-entropies between the predictions of two models."""
    p, q = student.softmax(1), teacher.softmax(1)
    return (-0.5 * (q * p.log()).sum(1) - 0.5 * (p * q.log()).sum(1)).mean()


LABELS = torch.tensor([0, 3, 6, 2, 2])
QUICK: dict[str, dict[str, Any]] = {
    "cotta": {"augment_below": 0.0},
    "petal": {"augment_below": 0.0},
    "memo": {"num_augmentations": 2, "optimizer": "sgd"},  # Adam's first step makes much of a rounding error
    "foa": {"population": 6},
    "vida": {"num_augmentations": 2, "high_rank": 8},
    "continual-mae": {"num_dropouts": 2, "optimizer": "sgd"},
    "rotta": {"memory": 8, "update_every": 4},
}
"""Settings for fewer passes, or more updates."""

_FILTERING = ("eta", "eata", "eata-come", "rdumb", "sar", "sar-come", "deyo", "ecotta", "becotta")
_PASSABLE: dict[str, dict[str, Any]] = {
    "pseudo-label": {"threshold": 0.35},
    **{name: {"entropy_margin": 1.0 if "come" in name else 0.83} for name in _FILTERING},
}
"""Settings with which some of the tiny model's predictions pass a method's filters."""
_PASSABLE["deyo"]["plpd_margin"] = 0.0

_SOURCE: dict[str, dict[str, Tensor]] = {}


def make(name: str, device: str = "cpu", **settings: Any) -> Pipeline:
    """Set up a method on the tiny ViT, at lr 0.01, with what it learns from source images."""
    settings = {"lr": 0.01, **_PASSABLE.get(name, {}), **QUICK.get(name, {}), **settings}
    if "lr" not in METHOD_TABLE[name].config.setting_names():
        del settings["lr"]
    pipeline = pipeline_of(name, tiny_vit().to(device), method_config(name, settings, batch_size=5))
    if pipeline.method.needs_source_data:
        method = learner(pipeline.method)
        if name not in _SOURCE:
            _SOURCE[name] = method.learn_source([random_images(4, seed).to(device) for seed in (90, 91)])
        method.use_source(_SOURCE[name])
    return pipeline


def run(pipeline: Pipeline, seed: int, count: int = 5) -> Tensor:
    """Predict a batch and learn from it, and from labels if the method needs them."""
    images = random_images(count, seed).to(pipeline.method.model.device)
    return pipeline(images, LABELS[:count] if pipeline.method.needs_labels else None)


# What holds for every method, also of other packages.


def check_state(name: str) -> None:
    """Check that a method continues from its state."""
    through, resumed = make(name), make(name)
    fresh = through.state_dict()
    run(through, 0)
    state = through.state_dict()
    resumed.load_state_dict(state)
    assert resumed.state_dict().keys() == state.keys()
    assert resumed.method.num_updates == through.method.num_updates
    learned = any(not torch.equal(tensor, fresh[key]) for key, tensor in state.items() if key != "generator")
    assert learned or not through.method.adapts  # weights, or what a method that rarely updates counts
    assert torch.equal(run(resumed, 1), run(through, 1))
    assert all(torch.equal(tensor, through.state_dict()[key]) for key, tensor in resumed.state_dict().items())


def check_prediction(name: str) -> None:
    """Check that predicting changes nothing, and equals the next prediction, unless the update comes first."""
    pipeline = make(name)
    run(pipeline, 0)
    before = pipeline.delta()
    logits = predicted(pipeline, random_images(5, 1))
    assert all(torch.equal(tensor, before[key]) for key, tensor in pipeline.delta().items())
    if not pipeline.method.predicts_after_update and name != "vida":  # whose scales follow the batch
        torch.testing.assert_close(run(pipeline, 1), logits)


def check_reset(name: str) -> None:
    """Check that a reset after a batch of one image is exact."""
    pipeline = make(name)
    source = predicted(pipeline, random_images(3, 2))
    numbers = pipeline.state_dict().get("generator")
    fresh = copy.deepcopy(pipeline.method.buffers)
    first = run(pipeline, 0, count=1)
    pipeline.reset()
    assert pipeline.method.num_updates == 0 and pipeline.method.buffers.keys() == fresh.keys()
    assert all(torch.equal(tensor, fresh[key]) for key, tensor in pipeline.method.buffers.items())
    assert torch.equal(predicted(pipeline, random_images(3, 2)), source)
    if numbers is not None:  # a reset does not draw the same random numbers again
        pipeline.load_state_dict({**pipeline.state_dict(), "generator": numbers})
    assert torch.equal(run(pipeline, 0, count=1), first)


def check_inference_mode(name: str) -> None:
    """Check that it does not matter whether the caller is in inference mode."""
    inside, outside = make(name), make(name)
    for seed in range(2):
        with torch.inference_mode():
            logits = run(inside, seed)
        assert torch.equal(logits, run(outside, seed))
    with torch.inference_mode():
        inside.reset()
    assert inside.method.num_updates == 0
