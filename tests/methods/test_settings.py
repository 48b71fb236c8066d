import math
from typing import Any

import pytest

from remtta.errors import UsageError
from remtta.methods.settings import renamed
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.settings.renamed import current_record
from remtta.methods.table import METHOD_TABLE, _warn_of_deprecated, method_config
from remtta.options import RunOptions
from remtta.options.option import Bounds, option_fields, read_pairs

PUBLISHED: dict[str, dict[str, object]] = {
    "rem": {"mask_ratios": [0.0, 0.1, 0.2], "ranking_weight": 1.0, "margin": 0.0, "lr": 1e-3, "optimizer": "adam"},
    "pseudo-label": {"threshold": 0.9, "lr": 0.01, "optimizer": "sgd"},
    "tent": {"lr": 1e-3, "optimizer": "sgd", "momentum": 0.9, "adapt_layers": "all"},
    "eta": {"max_cosine": 0.05, "lr": 1e-3},
    "eata": {"fisher_weight": 2000.0, "fisher_images": 2000},
    "rdumb": {"reset_every_steps": 1000, "lr": 2.5e-4},
    "sar": {"entropy_margin": 0.4, "rho": 0.05, "reset_below": 0.2},
    "deyo": {"plpd_margin": 0.2},
    "cotta": {"teacher_decay": 0.999, "num_augmentations": 32, "restore": 0.001, "lr": 1e-4, "optimizer": "sgd"},
    "petal": {"posterior_weight": 1e-11, "restore": 0.003, "lr": 0.01, "optimizer": "sgd"},
    "vida": {"high_rank": 128, "teacher_decay": 0.999, "num_augmentations": 10, "lr": 5e-7, "adapter_lr": 2e-7},
    "continual-mae": {"restore": 0.01, "lr": 1e-5, "optimizer": "adam"},
    "roid": {"lr": 2.5e-4},
    "cmf": {"least_kept": 0.89},
    "foa": {"num_prompts": 3},
    "memo": {"num_augmentations": 64, "lr": 1e-5},
}
"""By method, numbers of its paper or official code at a batch of 64 that its plain reading does not already need."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_method_has_the_published_numbers(name: str) -> None:
    used = method_config(name, {}, batch_size=64).used()
    assert PUBLISHED[name] == {setting: used[setting] for setting in PUBLISHED[name]}


def test_mask_ratios_may_come_as_any_sequence_of_numbers() -> None:
    ratios: Any = [0, 0.25]
    assert REMConfig(mask_ratios=ratios).mask_ratios == (0.0, 0.25)
    assert REMConfig(mask_ratios=ratios) == REMConfig(mask_ratios=(0.0, 0.25))


def test_records_name_only_settings_that_the_method_uses() -> None:
    assert method_config("rem", {}, batch_size=50).used()["mask_ratios"] == [0.0, 0.1, 0.2]
    fast = method_config("fast", {}, batch_size=50)
    assert fast.used() == {"episodic": False, "bn": "recent", "bn_prior": None, "precision": "auto"}


_START = "mask ratios must start with 0 and name at least one masked view, got "
_MASKINGS = "masking must be auto, attention, random, background, features or gradcam, got "
_CONSISTENCY = "consistency_weight must be > 0 where lambda is 0, got "
_ASCEND = "mask ratios must ascend within [0, 1), got "


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_ratios": ()}, _START + "none"),
        ({"mask_ratios": (0.0,)}, _START + "0"),
        ({"mask_ratios": (0.1, 0.2)}, _START + "0.1,0.2"),
        ({"mask_ratios": (0.0, 0.1, 0.1)}, _ASCEND + "0,0.1,0.1"),
        ({"mask_ratios": (0.0, 1.0)}, _ASCEND + "0,1"),
        ({"mask_ratios": (0.0, 10.0, 20.0)}, _ASCEND + "0,10,20; they are fractions: 0,0.1,0.2?"),
        ({"mask_ratios": (0.0, math.nan)}, _ASCEND + "0,nan"),
        ({"optimizer": "adamw"}, "optimizer must be adam or sgd, got adamw"),
        ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0"),
        ({"precision": "fp16"}, "precision must be auto, fp32 or bf16, got fp16"),
        ({"masking": "foreground"}, _MASKINGS + "foreground"),
        ({"masking": ["random"]}, _MASKINGS + "['random']"),
        ({"consistency_weight": 0.0, "ranking_weight": 0.0}, _CONSISTENCY + "0.0"),
        ("nesterov=no", "rem's nesterov must be true or false, got no"),
        ("steps=True", "rem's steps must be a whole number, got True"),
        ("micro_batch=2.5", "rem's micro_batch must be a whole number or None, got 2.5"),
        ("margin=False", "rem's margin must be a number, got False"),
        ("confident_below=low", "rem's confident_below must be a number or None, got low"),
        ("adapt_layers=True", "rem's adapt_layers must be text or None, got True"),
    ],
)
def test_a_setting_out_of_range_or_of_another_type_is_refused_by_name_and_value(
    settings: dict[str, Any] | str, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        method_config("rem", read_pairs([settings], "--set") if isinstance(settings, str) else settings, batch_size=8)
    assert str(caught.value) == message


def test_another_optimizer_leaves_out_the_nesterov_momentum_of_the_default() -> None:
    assert method_config("cotta", {}, batch_size=16).nesterov
    assert not method_config("cotta", {"optimizer": "adam"}, batch_size=16).nesterov
    assert not method_config("cotta", {"momentum": 0.0}, batch_size=16).nesterov
    with pytest.raises(UsageError, match="nesterov must be used with sgd and momentum"):
        method_config("cotta", {"optimizer": "adam", "nesterov": True}, batch_size=16)


@pytest.mark.parametrize(
    ("method", "pair", "taken"),
    [
        ("cotta", "nesterov=false", False),
        ("cotta", "episodic=TRUE", True),
        ("rem", "steps=2", 2),
        ("rem", "micro_batch=None", None),
        ("rem", "margin=1", 1),
        ("rem", "adapt_layers=0,2", "0,2"),
        ("rem", "adapt_layers=1", "1"),
    ],
)
def test_a_setting_in_text_is_taken_by_its_type(method: str, pair: str, taken: object) -> None:
    found = getattr(method_config(method, read_pairs([pair], "--set"), batch_size=8), pair.partition("=")[0])
    assert found == taken and type(found) is type(taken)


def test_old_names_of_settings_and_methods_are_read_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    renamed._warn.cache_clear()
    _warn_of_deprecated.cache_clear()
    expected = method_config("tent", {"center": True, "steps": 3}, batch_size=8)
    old = read_pairs(["centre=true", "answer=None", "steps=3"], "--set")
    for _ in "ab":
        assert method_config("tent", old, batch_size=8) == expected
    constructed: dict[str, Any] = {"lr": expected.lr, "steps": 3, "centre": True}
    assert type(expected)(**constructed) == expected
    assert sorted(caplog.messages) == [
        "the setting answer is now called prediction_step",
        "the setting centre is now called center",
    ]
    assert method_config("tent", {"answer": "last"}, batch_size=8).prediction_step == "last"
    assert method_config("centre", {}, batch_size=8) == method_config("center", {}, batch_size=8)
    assert "the method centre is deprecated: use center" in caplog.messages


def test_records_of_0_5_0_are_read_under_the_names_of_today() -> None:
    record = {"name": "centre", "centre": True, "answer": None, "lr": 0.1}
    assert current_record(record) == {"name": "center", "center": True, "prediction_step": "first", "lr": 0.1}
    assert current_record({"answer": "last"}) == {"prediction_step": "last"}


def test_no_setting_is_infinite_or_below_its_bounds() -> None:
    for method, member in [
        (name, each) for name, named in METHOD_TABLE.items() for each in option_fields(named.config)
    ]:
        if member.name not in METHOD_TABLE[method].config.setting_names():
            continue
        bounds = member.first(Bounds) or Bounds()
        assert member.type is not float or bounds != Bounds()
        values: list[float] = [math.inf, -math.inf, math.nan] if member.type is float else []
        values += [member.type(low) - 1 for low in (bounds.min, bounds.above) if low is not None and low > -math.inf]
        for value in values:
            with pytest.raises(UsageError, match=f"({member.name}|lambda) must be .*, got {value}$"):
                method_config(method, {member.name: value}, batch_size=8)


def test_the_edges_of_the_ranges_are_accepted() -> None:
    config = REMConfig(mask_ratios=(0.0, 0.999), ranking_weight=0.0, margin=0.0, momentum=0.0, micro_batch=1)
    options = RunOptions(batch_size=1, topk=1, save_every=1, reset_every=1)
    assert (config.mask_ratios, config.micro_batch, options.reset_every) == ((0.0, 0.999), 1, 1)


@pytest.mark.parametrize("lr", [10**400, math.nan, -71, True, "fast"])
def test_a_rate_that_is_no_finite_number_above_0_has_no_anchor(lr: object) -> None:
    with pytest.raises(UsageError, match="lr must be a finite number"):
        method_config("remtta", {"lr": lr}, batch_size=8)


def test_a_rate_whose_anchor_would_undo_every_update_is_refused() -> None:
    assert method_config("remtta", {"lr": 0.9}, batch_size=8).anchor < 1
    for method, more in (("remtta", {}), ("rem", {"anchor": "auto"})):
        with pytest.raises(UsageError, match=r"lr must be at most 0.9 with anchor auto, which .* update, got 100.0$"):
            method_config(method, {"lr": 100.0, **more}, batch_size=8)
    assert method_config("remtta", {"lr": 100.0, "anchor": 0.01}, batch_size=8).anchor == 0.01
