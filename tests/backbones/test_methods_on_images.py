"""Every method on a net of batch norms, on one of layer norms, and on windows of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from remtta.deltas.delta import load_delta
from remtta.errors import ModelError
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import method_config
from remtta.pipeline.pipeline import Pipeline
from tests.backbones.tiny_models import pictures, tiny
from tests.conftest import draw_folder, random_images, tiny_vit
from tests.methods.making import QUICK, learner, pipeline_of, predicted
from tests.records import record_of
from tests.runs.tiny import assert_goes_on

IN_BETWEEN = ("foa", "vida", "continual-mae", "becotta")
RUNNING = [*(("resnet", name) for name in ("norm", "rem", "sar", "ecotta", "neo", "spa", "rotta")), ("swin", "rem")]
"""One method of each way to learn."""
OWN: dict[str, dict[str, Any]] = {
    "rem": {"lr": 0.01, "mask_ratios": (0.0, 0.25, 0.5)},
    **{name: {"lr": 0.01, "entropy_margin": 1.0} for name in ("sar", "ecotta")},
    "tent": {"lr": 0.01},
    "rotta": {"memory": 8, "update_every": 4},
}
"""Settings with which a method moves the tiny models, and every prediction passes its filters."""


def config_of(name: str, **settings: Any) -> MethodConfig:
    return method_config(name, {**OWN.get(name, {}), **settings}, batch_size=5)


def make(family: str, name: str, **settings: Any) -> Pipeline:
    pipeline = pipeline_of(name, tiny(family), config_of(name, **settings))
    if pipeline.method.needs_source_data:
        method = learner(pipeline.method)
        method.use_source(method.learn_source([pictures(4, 90), pictures(4, 91)]))
    return pipeline


@pytest.mark.parametrize(("family", "name"), RUNNING)
def test_a_method_continues_from_its_state_bit_for_bit_and_a_reset_is_exact(family: str, name: str) -> None:
    through, resumed = make(family, name), make(family, name)
    start = predicted(through, pictures(5, 9))
    assert torch.isfinite(through(pictures(5, 0))).all()
    assert through.method.num_updates > 0 or not through.method.adapts
    resumed.load_state_dict(through.state_dict())
    assert torch.equal(resumed(pictures(5, 1)), through(pictures(5, 1)))
    assert torch.isfinite(resumed(pictures(1, 5))).all()
    resumed.reset()
    assert torch.equal(predicted(resumed, pictures(5, 9)), start)


@pytest.mark.parametrize("name", ["cotta", "roid", "cmf", "memo", "vida", "continual-mae", "ecotta", "spa", "rotta"])
def test_under_a_default_of_float64_a_float32_model_predicts_the_same(name: str) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        vit, images = tiny_vit(), random_images(5)
        torch.set_default_dtype(dtype)
        try:
            pipeline = pipeline_of(name, vit, config_of(name, **QUICK.get(name, {})))
            if pipeline.method.needs_source_data:
                method = learner(pipeline.method)
                method.use_source(method.learn_source([images.flip(-1)]))
            found.append([pipeline(images), pipeline(images)])
        finally:
            torch.set_default_dtype(torch.float32)
    tolerance = 1.0 if name == "ecotta" else 1e-3  # its networks start from other random numbers
    torch.testing.assert_close(*found, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["remtta", "fast"])
def test_a_state_after_a_batch_that_counted_in_part_continues_bit_for_bit(name: str) -> None:
    through, resumed = make("resnet", name), make("resnet", name)
    learnable = torch.tensor([True, True, False, True, False])
    through.predict(pictures(5, 0), learnable)
    through.learn()
    resumed.load_state_dict(through.state_dict())
    for seed in (1, 2):
        assert torch.equal(*(each.predict(pictures(5, seed), learnable).logits for each in (through, resumed)))
        through.learn()
        resumed.learn()


def test_lame_predicts_by_running_statistics() -> None:
    torch.testing.assert_close(
        make("resnet", "lame")(pictures(1, 0)), make("resnet", "source")(pictures(1, 0)).log_softmax(1)
    )


def test_predicting_as_early_as_possible_comes_to_the_same() -> None:
    together, apart = make("resnet", "tent"), make("resnet", "tent")
    for seed in range(2):
        with torch.inference_mode():
            logits = apart.predict(pictures(5, seed), latency=True).logits
        torch.testing.assert_close(logits, together(pictures(5, seed)), atol=1e-4, rtol=1e-3)
        apart.learn()
    assert apart.method.num_updates == together.method.num_updates
    torch.testing.assert_close(apart.delta(), together.delta(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", IN_BETWEEN)
def test_methods_that_reach_in_between_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="works on tokens between a transformer's blocks, and ResNet has none"):
        make("resnet", name)


def test_a_stopped_run_continues_bit_for_bit_with_statistics_in_its_delta(tmp_path: Path) -> None:
    config, model = config_of("rem", bn="recent"), tiny("resnet")
    options = {"batch_size": 3, "save_every": 1}
    assert_goes_on(model, draw_folder(tmp_path / "frames", range(10)), tmp_path, config=config, options=options)
    assert any("running" in name for name in load_delta(tmp_path / "run").tensors)
    assert record_of(tmp_path / "run")["adapted"] == list(pipeline_of("rem", model, config).method.trained)
