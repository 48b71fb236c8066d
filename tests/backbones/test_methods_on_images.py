"""Every method on a net of batch norms, on one of layer norms, and on windows of tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta.deltas.delta import load_delta
from remtta.errors import ModelError
from remtta.methods.method import Method, build_method
from remtta.methods.settings import MethodConfig, method_config
from tests.backbones.tiny_models import pictures, tiny
from tests.conftest import draw_folder
from tests.methods.test_registry import PASSABLE, QUICK
from tests.records import record_of
from tests.runs.test_resume import assert_goes_on

IN_BETWEEN = ("foa", "vida", "continual-mae", "becotta")
RUNNING = [*(("resnet", name) for name in ("norm", "rem", "sar", "ecotta")), ("swin", "rem")]
"""One method of each way to learn."""
LABELS = torch.tensor([0, 3, 6, 2, 2])


def config_of(name: str, **settings: Any) -> MethodConfig:
    own = {**PASSABLE.get(name, {}), **QUICK.get(name, {})}
    if "entropy_margin" in own:
        own["entropy_margin"] = 1.0
    if name == "rem":
        own["mask_ratios"] = (0.0, 0.25, 0.5)
    lr = {} if name in ("norm", "lame", "source", "foa") else {"lr": 0.01}
    return method_config(name, {**lr, **own, **settings}, batch_size=5)


def make(family: str, name: str, **settings: Any) -> Method:
    method = build_method(name, tiny(family), config_of(name, **settings))
    if method.objective.needs_source:
        method.use_source(method.source_statistics([pictures(4, 90), pictures(4, 91)]))
    return method


def run(method: Method, seed: int, count: int = 5) -> Tensor:
    return method(pictures(count, seed), LABELS[:count] if method.objective.needs_labels else None)


@pytest.mark.parametrize(("family", "name"), RUNNING)
def test_a_method_continues_from_its_state_bit_for_bit_and_a_reset_is_exact(family: str, name: str) -> None:
    through, resumed = make(family, name), make(family, name)
    start = through.predict(pictures(5, 9))
    assert torch.isfinite(run(through, 0)).all()
    assert through.num_updates > 0 or not through.adapts
    resumed.load_state(copy.deepcopy(through.state()))
    assert torch.equal(run(resumed, 1), run(through, 1))
    assert torch.isfinite(run(resumed, 5, count=1)).all()
    resumed.reset()
    assert torch.equal(resumed.predict(pictures(5, 9)), start)


def test_answering_first_and_learning_then_comes_to_the_same() -> None:
    together, apart = make("resnet", "tent"), make("resnet", "tent")
    for seed in range(2):
        with torch.inference_mode():
            answer = apart.answer(pictures(5, seed))
        torch.testing.assert_close(answer, run(together, seed), atol=1e-4, rtol=1e-3)
        apart.learn(LABELS)
    assert apart.num_updates == together.num_updates
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
    assert record_of(tmp_path / "run")["adapted"] == list(build_method("rem", model, config).adapted_names)
