"""Observers asked as an adapter asks them."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from remtta.guard.guard import Guard
from remtta.guard.observed import ObservedMethod
from remtta.guard.observer import Answers, Observer


def observe(observer: Observer, logits: Tensor, **more: Any) -> Tensor:
    """Return an observer's answers for logits (B, C) of the next frames; `more` sets other fields of `Answers`."""
    none = torch.empty(len(logits), 0)
    centre = SimpleNamespace(offset=torch.zeros(()))
    method = SimpleNamespace(adapts=True, net=SimpleNamespace(centre=centre, source_centre=centre))
    answers = Answers(cast(Any, method), none, torch.ones(len(logits), dtype=torch.bool))
    for name, value in {"logits": logits, **more}.items():
        setattr(answers, name, value)
    observer.answer(answers)
    return answers.logits


def ask(guard: Guard, images: Tensor, *, learn: bool = True) -> Answers:
    """The answers of a guarded method, which learns from the images."""
    return ObservedMethod(guard.method, [guard]).predict(images, torch.full((len(images),), learn))
