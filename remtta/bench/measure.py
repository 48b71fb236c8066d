"""Speed and memory of every method on this machine, as multiples of a plain forward pass."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from remtta.backbones.families import backbone_of, compile_blocks
from remtta.bench.machine import joules, processor
from remtta.bench.options import ANSWER, FORWARD, PLAIN_REM, SUBJECTS, BenchOptions
from remtta.bench.plain_rem import PlainREM
from remtta.bench.products import BareProduct, count_flop
from remtta.errors import ModelError, UsageError
from remtta.guard.adapter import Adapter
from remtta.guard.guard import guarded
from remtta.methods.method import Method, build_method
from remtta.methods.settings import METHOD_TABLE, REMConfig, algorithm_of, method_config
from remtta.models.building import create
from remtta.models.loading import load, select_device
from remtta.models.peak_memory import keep_freed_memory, peak_bytes, resident_bytes, start_peak
from remtta.models.precision import ForwardContext
from remtta.models.preprocessing import preprocessing_of
from remtta.models.prompts import is_zero_shot
from remtta.options import GuardOptions

_log = logging.getLogger("remtta")

MEMORY_STEPS = 2

Step = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A subject's step on random images, the model it is on, and the method behind it, if there is one."""

    step: Step
    model: Any
    method: Method | None = None


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
        gflop: Billions of operations of the step's matrix products, additions and multiplications apart.
        matmul_share: Time that these products would take at the speed of `BareProduct`, at the step's precision,
            over the time of the step.
        cpu_s_per_1000: Time of all cores together for 1,000 images, in seconds.
        joules_per_1000: Energy that the machine's processors used meanwhile, where it can be read.
    """

    subject: str
    seconds: float
    forwards: float
    images_per_s: float
    peak_bytes: int | None
    violating_share: float | None
    gflop: float
    matmul_share: float
    cpu_s_per_1000: float
    joules_per_1000: float | None


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
    prepared = _prepare_all(names, options)
    names = list(prepared)
    device = select_device(options.device)
    for subject in prepared.values():
        subject.step()  # warms up, and lets REM learn how many images violate the order
    bare = _bare_products(prepared[FORWARD].model, options, device)
    times: dict[str, list[_Spent]] = {name: [] for name in names}
    product_times: dict[bool, list[_Spent]] = {ours: [] for ours in bare}
    for product in bare.values():
        product()
    for number in range(options.repeats):
        for name, subject in prepared.items():
            times[name].append(_timed(subject.step, device))
        for ours, product in bare.items():
            product_times[ours].append(_timed(product, device))
        on_round(number + 1)
    spent = {name: _median(taken) for name, taken in times.items()}
    seconds = {name: each.seconds for name, each in spent.items()}
    per_flop = {ours: _median(taken).seconds / bare[ours].flop for ours, taken in product_times.items()}
    thousand = 1000 / options.batch_size
    shares = {name: _violating_share(subject.method) for name, subject in prepared.items()}
    flop = {name: count_flop(subject.step) for name, subject in prepared.items()}
    del prepared
    peaks = {name: _peak_in_a_process(name, options) if options.memory else None for name in names}
    return [
        Measurement(
            subject=name,
            seconds=seconds[name],
            forwards=seconds[name] / seconds[FORWARD],
            images_per_s=options.batch_size / seconds[name],
            peak_bytes=peaks[name],
            violating_share=shares[name],
            gflop=flop[name] / 1e9,
            matmul_share=flop[name] * per_flop[name not in (FORWARD, PLAIN_REM)] / seconds[name],
            cpu_s_per_1000=spent[name].cpu_s * thousand,
            joules_per_1000=None if (used := spent[name].joules) is None else used * thousand,
        )
        for name in names
    ]


def _prepare_all(subjects: Sequence[str], options: BenchOptions) -> dict[str, Prepared]:
    """Every subject; of all that there are, without what a model of this kind has none of."""
    prepared = {}
    for name in subjects:
        try:
            prepared[name] = prepare(name, options)
        except ModelError as error:
            if name != PLAIN_REM or options.subjects != SUBJECTS:
                raise
            _log.info("without %s: %s", PLAIN_REM, error)
    return prepared


def prepare(subject: str, options: BenchOptions) -> Prepared:
    """A subject's step on random images.

    Raises:
        UsageError: If there is no such model.
        CheckpointError: If the checkpoint does not fit it.
    """
    device = select_device(options.device)
    torch.manual_seed(options.seed)
    model = _model(options).eval().to(device)
    if options.compile and subject not in (FORWARD, PLAIN_REM):
        compile_blocks(model)
    height, width = preprocessing_of(model).input_size
    images = torch.randn(options.batch_size, 3, height, width, device=device)
    if subject == FORWARD:
        return Prepared(lambda: _forward(model, images), model)
    if subject == PLAIN_REM:
        plain = PlainREM(model, REMConfig())
        return Prepared(lambda: plain.step(images), model)
    name = "rem" if subject == ANSWER else subject
    settings: dict[str, Any] = {"precision": options.precision}
    if algorithm_of(name) == "rem" and options.mask_ratios:
        settings["mask_ratios"] = options.mask_ratios
    config = method_config(name, settings, batch_size=options.batch_size)
    method = build_method(name, model, config)
    named = METHOD_TABLE[name]
    guard = guarded(method, GuardOptions(action=named.action, answer=named.answer), config)
    step = method.answer if subject == ANSWER else Adapter(method, [guard]).predict if guard else method
    return Prepared(lambda: step(images), model, method)


def _model(options: BenchOptions) -> Any:
    given = options.model
    name = given.name or ""
    if not is_zero_shot(name) and name not in timm.list_models():
        raise UsageError(f'unknown model "{name}"; timm.list_models() names them all')
    if is_zero_shot(name) or given.checkpoint is not None:
        return load(given)
    kwargs = dict(given.model_kwargs)
    if given.num_classes is not None:
        kwargs["num_classes"] = given.num_classes
    try:
        model: Any = create(name, pretrained=False, kwargs=kwargs, input_size=given.input_size)
    except TypeError as error:
        raise UsageError(f"{name} does not take these model arguments: {error}") from error
    if given.input_size is not None:
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *given.input_size)}
    return model


def _bare_products(model: nn.Module, options: BenchOptions, device: torch.device) -> dict[bool, BareProduct]:
    """One as PyTorch runs it, for what is plain timm (False), and one as the methods run theirs (True)."""
    backbone, own = backbone_of(model), ForwardContext(model, options.precision)
    plain: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    return {
        ours: BareProduct(backbone, options.batch_size, context)
        for ours, context in {False: plain, True: own(device)}.items()
    }


@torch.no_grad()
def _forward(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits


class _Spent(NamedTuple):
    seconds: float
    cpu_s: float
    joules: float | None


def _timed(step: Step, device: torch.device) -> _Spent:
    _wait(device)
    energy, cpu_s, started = joules(), time.process_time(), time.perf_counter()
    step()
    _wait(device)
    seconds, cpu_s, after = time.perf_counter() - started, time.process_time() - cpu_s, joules()
    # The counter may have started over meanwhile.
    used = None if energy is None or after is None or after < energy else after - energy
    return _Spent(seconds, cpu_s, used)


def _median(spent: Sequence[_Spent]) -> _Spent:
    energies = [each.joules for each in spent if each.joules is not None]
    return _Spent(
        statistics.median(each.seconds for each in spent),
        statistics.median(each.cpu_s for each in spent),
        statistics.median(energies) if energies else None,
    )


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
    step = prepare(subject, options).step
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    start_peak(device)
    for _ in range(MEMORY_STEPS):
        step()
    return max(0, peak_bytes(device) - before)


def as_json(options: BenchOptions, measured: Sequence[Measurement], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about a benchmark, ready for JSON."""
    model, own = options.model, asdict(options)
    del own["model"]
    names = ("checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size")
    about = {name: getattr(model, name) for name in names}
    return {
        "options": {"model": model.name, **about, "checkpoint": model.checkpoint and str(model.checkpoint), **own},
        "environment": {**environment, **processor()},
        "measurements": [asdict(each) for each in measured],
    }


def _violating_share(method: Method | None) -> float | None:
    share = method.objective.memory.get("violating_share") if method else None
    return None if share is None else float(share)
