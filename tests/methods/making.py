"""Build methods on a model from their objectives, and parts of the plain readings that they are compared with."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from remtta.methods.method import Updater
from remtta.methods.objective import Objective
from remtta.methods.settings import MethodConfig
from tests.conftest import NUM_CLASSES, tiny_vit

Kind = TypeVar("Kind", bound=Objective[Any])


def made(objective: type[Kind], model: nn.Module, config: MethodConfig | None = None) -> Updater[Kind]:
    """Return the method of an objective on a model, by default with its default settings."""
    return Updater(model, config or objective.settings(), objective)


def vivid_vit(scale: float) -> Any:
    """Return the tiny ViT with predictions from nearly certain to nearly uniform."""
    model: Any = tiny_vit(depth=4)
    with torch.no_grad():
        model.head.weight.mul_(scale)
    return model


def norms(*roots: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of all LayerNorms, which are to learn."""
    found = [p for root in roots for m in root.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    for parameter in found:
        parameter.requires_grad_(True)
    return found


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def entropies(logits: Tensor) -> Tensor:
    """In nats, of each prediction."""
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
    """The mean of both cross-entropies between the answers of two models."""
    p, q = student.softmax(1), teacher.softmax(1)
    return (-0.5 * (q * p.log()).sum(1) - 0.5 * (p * q.log()).sum(1)).mean()
