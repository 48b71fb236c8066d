"""Speed and memory of every method on this machine, as multiples of a plain forward pass."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from remtta.config import REMConfig, method_config
from remtta.errors import UsageError
from remtta.layers import unwrap
from remtta.losses import rem_loss
from remtta.masking import gather_patches, keep_indices
from remtta.memory import keep_freed_memory, peak_bytes, resident_bytes, start_peak
from remtta.methods import build_method
from remtta.methods.rem import REM
from remtta.models import select_device

FORWARD = "forward"
PLAIN_REM = "rem-plain"
SUBJECTS = (FORWARD, "tent", "rem", "rem-n1", PLAIN_REM)
MEMORY_STEPS = 2

Step = Callable[[], object]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        model: timm name; the weights are random, since they do not matter for speed.
        model_kwargs: More arguments for the model.
        batch_size: Images per step.
        repeats: Rounds; in each round every subject has one step, so that noise meets all alike.
        precision: "fp32" or "bf16"; the plain forward pass they are compared with is always fp32.
        device: Where to run.
        threads: CPU threads, or None for all.
        memory: Measure peak memory as well, each subject in a process of its own.
        subjects: Which of SUBJECTS.
    """

    model: str = "vit_small_patch16_224"
    model_kwargs: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 16
    repeats: int = 5
    precision: str = "fp32"
    device: str = "auto"
    threads: int | None = None
    memory: bool = True
    subjects: tuple[str, ...] = SUBJECTS

    def __post_init__(self) -> None:
        unknown = [name for name in self.subjects if name not in SUBJECTS]
        if unknown:
            raise UsageError(f"cannot measure {', '.join(unknown)}; choose from {', '.join(SUBJECTS)}")
        if self.batch_size < 1 or self.repeats < 1:
            raise UsageError("batch size and repeats must be >= 1")


@dataclass(frozen=True)
class Measurement:
    """One subject's figures.

    Attributes:
        subject: One of SUBJECTS.
        seconds: Median time of a step.
        forwards: The same as a multiple of a plain fp32 forward pass.
        images_per_s: Images per second.
        peak_bytes: Most memory of two steps over that of the loaded model, if measured.
        violating_share: REM: recent share of images that violate the order of entropies.
    """

    subject: str
    seconds: float
    forwards: float
    images_per_s: float
    peak_bytes: int | None
    violating_share: float | None


def run_bench(options: BenchOptions, on_round: Callable[[int], None] = lambda number: None) -> list[Measurement]:
    """Measure, round by round.

    Args:
        options: What to measure.
        on_round: Called with the number of finished rounds.

    Raises:
        UsageError: If the model or device does not exist.
        ModelError: If a method cannot adapt the model.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    names = [FORWARD, *(name for name in options.subjects if name != FORWARD)]
    prepared = {name: prepare(name, options) for name in names}
    device = select_device(options.device)
    times: dict[str, list[float]] = {name: [] for name in names}
    for step, _ in prepared.values():
        step()  # warms up, and lets REM learn how many images violate the order
    for number in range(options.repeats):
        for name, (step, _) in prepared.items():
            times[name].append(_timed(step, device))
        on_round(number + 1)
    base = statistics.median(times[FORWARD])
    shares = {name: getattr(method, "violating_share", None) for name, (_, method) in prepared.items()}
    del prepared
    peaks = {name: _peak_in_a_process(name, options) if options.memory else None for name in names}
    return [
        Measurement(
            subject=name,
            seconds=statistics.median(taken),
            forwards=statistics.median(taken) / base,
            images_per_s=options.batch_size / statistics.median(taken),
            peak_bytes=peaks[name],
            violating_share=shares[name],
        )
        for name, taken in times.items()
    ]


def prepare(subject: str, options: BenchOptions) -> tuple[Step, object]:
    """A subject's step on random images, and the method behind it.

    Raises:
        UsageError: If there is no such model.
    """
    if options.model not in timm.list_models():
        raise UsageError(f'unknown model "{options.model}"; timm.list_models() names them all')
    device = select_device(options.device)
    torch.manual_seed(0)
    model: Any = timm.create_model(options.model, pretrained=False, **dict(options.model_kwargs))
    model = model.eval().to(device)
    height, width = model.patch_embed.img_size
    images = torch.randn(options.batch_size, 3, height, width, device=device)
    if subject == FORWARD:
        return lambda: _forward(model, images), None
    if subject == PLAIN_REM:
        plain = PlainREM(model, REMConfig())
        return lambda: plain.step(images), None
    config = method_config(subject, {"precision": options.precision}, batch_size=options.batch_size)
    method = build_method(subject, model, config)
    return lambda: method(images), method


@torch.no_grad()
def _forward(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits


def _timed(step: Step, device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_in_a_process(subject: str, options: BenchOptions) -> int:
    """In a fresh process, since the peak of this one holds the others' memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_peak, (subject, options))


def measure_peak(subject: str, options: BenchOptions) -> int:
    """Most memory of a few steps over that of the loaded model, in bytes."""
    keep_freed_memory()  # as the command line does
    if options.threads:
        torch.set_num_threads(options.threads)
    device = select_device(options.device)
    step, _ = prepare(subject, options)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    start_peak(device)
    for _ in range(MEMORY_STEPS):
        step()
    return max(0, peak_bytes(device) - before)


class PlainREM:
    """REM as the reference code runs it, for comparison only.

    Every weight requires a gradient, every attention map is written out, and
    each view is a full forward pass of its own.

    Args:
        model: A timm VisionTransformer.
        config: REM's settings.
    """

    def __init__(self, model: nn.Module, config: REMConfig) -> None:
        self._rem = REM(model, config)  # chooses the norms
        self._vit = unwrap(model)
        self._config = config
        norms = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.requires_grad_(True)
        self._optimizer = torch.optim.Adam(norms, lr=config.lr)
        for block in self._vit.blocks:
            block.attn.fused_attn = False
        self._map: Tensor | None = None
        self._vit.blocks[-1].attn.attn_drop.register_forward_hook(self._keep_map)

    def step(self, images: Tensor) -> Tensor:
        """Predict and adapt; returns the logits (B, C)."""
        logits = [self._view(images, None)]
        assert self._map is not None
        cls_attn = self._map[:, :, 0, self._vit.num_prefix_tokens :].mean(1).detach()
        logits += [self._view(images, keep_indices(cls_attn, ratio)) for ratio in self._config.mask_ratios[1:]]
        self._optimizer.zero_grad()
        rem_loss(torch.stack(logits), self._config.ranking_weight).backward()
        self._optimizer.step()
        return logits[0].detach()

    def _view(self, images: Tensor, kept: Tensor | None) -> Tensor:
        vit = self._vit
        tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
        if kept is not None:
            tokens = gather_patches(tokens, kept, vit.num_prefix_tokens)
        logits: Tensor = vit.forward_head(vit.norm(vit.blocks(tokens)))
        return logits

    def _keep_map(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._map = output


def as_json(options: BenchOptions, measured: Sequence[Measurement], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about a benchmark, ready for JSON."""
    return {
        "options": {**asdict(options), "model_kwargs": dict(options.model_kwargs)},
        "environment": {**environment, "cores": os.cpu_count()},
        "measurements": [asdict(each) for each in measured],
    }
