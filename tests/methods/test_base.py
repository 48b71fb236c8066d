"""What every method gets from its base class: a class with only a `loss` trains in a pipeline."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from remtta.errors import ModelError, UsageError
from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.settings.base import MethodConfig
from tests.conftest import random_images, tiny_vit
from tests.methods.making import pipeline_of


class Confident(Method[MethodConfig]):
    """Maximise the mean log-probability of the predicted classes."""

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        return LossOutput(logits.unsqueeze(0), -logits.log_softmax(-1).amax(-1).mean(), len(images))


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 2}, {"steps": 2}, {"center": True, "steps": 2}])
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
        (lambda x: (x, x.mean(), 5), r"logits of shape \(L, 5, 7\), got a tensor of shape \(5, 7\)$"),
        (lambda x: (x[:, None].expand(5, 3, 7), x.mean(), 5), r"logits of shape \(L, 5, 7\), got .* \(5, 3, 7\)$"),
        (lambda x: (None, x.mean(), 5), r"logits of shape \(L, 5, 7\), got NoneType None$"),
        (lambda x: x.mean(), r"views, loss and count, got a tensor of shape \(\)$"),
        (lambda x: (x[None], x.mean(0), 5), r"a tensor of one number, got a tensor of shape \(7,\)$"),
        (lambda x: (x[None], None, 5), "a tensor of one number, got NoneType None$"),
        (lambda x: (x[None], x.mean().item(), 5), "a tensor of one number, got float "),
        (lambda x: (x[None], x.mean(), 5.0), r"a number of images, got float 5\.0$"),
        (lambda x: (x[None], x.mean(), -1), "a number of images, got int -1$"),
        (lambda x: (x[None], x.detach().mean(), 5), "has no gradient; compute it from logits that"),
        (lambda x: (x[None].detach(), x.detach().mean(), 5), "has no gradient; compute it from logits that"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"micro_batch": 5, "center": True}])
def test_a_loss_that_returns_something_else_is_refused_in_a_line(
    wrong: Callable[[Tensor], Any], told: str, settings: dict[str, Any]
) -> None:
    class Wrong(Method[MethodConfig]):
        def loss(self, images: Tensor, center: Center) -> LossOutput:
            return cast(LossOutput, wrong(self.logits(images)))

    pipeline = pipeline_of(Wrong, tiny_vit(), MethodConfig(**settings))
    with pytest.raises(UsageError, match=r"Wrong\.loss .*" + told) as caught:
        pipeline(random_images(5))
    assert "\n" not in str(caught.value)


def test_a_prediction_after_the_update_has_a_row_for_every_image() -> None:
    class Short(Method[MethodConfig]):
        predicts_after_update = True

        def update_and_predict(self, images: Tensor) -> Tensor:
            return self.forward(images)[:3]

    with pytest.raises(
        UsageError, match=r"update_and_predict returns must be logits of shape \(5, 7\), got .* \(3, 7\)$"
    ):
        pipeline_of(Short, tiny_vit())(random_images(5))


def test_a_model_without_gradients_is_named_and_a_loss_of_zero_is_none() -> None:
    class Zero(Method[MethodConfig]):
        def loss(self, images: Tensor, center: Center) -> LossOutput:
            logits = self.logits(images)
            return LossOutput(logits[None], logits.new_zeros(()), len(images))

    pipeline = pipeline_of(Zero, tiny_vit())
    pipeline(random_images(5))
    assert pipeline.method.num_updates == 0
    model: Any = tiny_vit()
    model.head.forward = lambda features: nn.Linear.forward(model.head, features).detach()
    with pytest.raises(ModelError, match="have no gradients, so nothing can be learned"):
        pipeline_of(Confident, model)(random_images(5))


def test_the_views_of_a_batch_are_those_of_its_update_or_none() -> None:
    pipeline = pipeline_of(Confident, tiny_vit())
    logits = pipeline(random_images(5))
    assert pipeline.method.last_views is not None and torch.equal(pipeline.method.last_views[0], logits)
    pipeline.predict(random_images(3))  # and not learned from, as a harmful batch is not
    assert pipeline.method.last_views is None
