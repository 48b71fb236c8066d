"""What every method gets from its base class: a class with only a `loss` trains in a pipeline."""

from typing import Any

import pytest
import torch
from torch import Tensor

from remtta.errors import RemttaError
from remtta.methods.base import Center, Loss, Method
from remtta.methods.settings import MethodConfig
from tests.conftest import random_images, tiny_vit
from tests.methods.making import pipeline_of


class Confident(Method[MethodConfig]):
    """Maximise the mean log-probability of the predicted classes."""

    def loss(self, images: Tensor, center: Center) -> Loss:
        logits = center(self.logits(images))
        return logits.unsqueeze(0), -logits.log_softmax(-1).amax(-1).mean(), len(images)


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 2}, {"steps": 2}, {"centre": True, "steps": 2}])
def test_a_class_with_only_a_loss_trains(settings: dict[str, Any]) -> None:
    pipeline = pipeline_of(Confident, tiny_vit(), MethodConfig(lr=0.01, optimizer="sgd", **settings))
    plain, center = tiny_vit(), pipeline.centering.adapted
    learned = [plain.get_parameter(name) for name in pipeline.method.trained]
    optimizer = torch.optim.SGD(learned, lr=0.01, momentum=0.9)
    for seed in range(3):
        images = random_images(5, seed)
        torch.testing.assert_close(pipeline(images), center(plain(images)).detach(), atol=1e-4, rtol=1e-4)
        for _ in range(settings.get("steps", 1)):
            optimizer.zero_grad()
            (-center(plain(images)).log_softmax(-1).amax(-1).mean()).backward()
            optimizer.step()
    trained = list(pipeline.method.trained.values())
    torch.testing.assert_close(trained, learned, atol=1e-5, rtol=1e-4)
    assert pipeline.method.num_updates == 3 * settings.get("steps", 1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            lambda logits: (logits, logits.mean(), 5),
            r"Wrong\.loss must return logits of shape \(L, B, C\), got \(5, 7\)$",
        ),
        (lambda logits: (logits.detach()[None], logits.detach().mean(), 5), "have no gradients, so nothing can be"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_in_a_line(wrong: Any, told: str) -> None:
    class Wrong(Method[MethodConfig]):
        def loss(self, images: Tensor, center: Center) -> Loss:
            return wrong(self.logits(images))

    pipeline = pipeline_of(Wrong, tiny_vit())
    with pytest.raises(RemttaError, match=told) as caught:
        pipeline(random_images(5))
    assert "\n" not in str(caught.value)


def test_the_views_of_a_batch_are_those_of_its_update_or_none() -> None:
    pipeline = pipeline_of(Confident, tiny_vit())
    logits = pipeline(random_images(5))
    assert pipeline.method.last_views is not None and torch.equal(pipeline.method.last_views[0], logits)
    pipeline.predict(random_images(3))  # and not learned from, as a harmful batch is not
    assert pipeline.method.last_views is None
