"""Names of methods in an evaluation."""

import pytest

from remtta.errors import UsageError
from remtta.lab.evaluation.variants import CIFAR, MethodsOptions, MethodVariant, parse_variants
from remtta.methods.table import METHOD_TABLE, method_config


def test_a_name_is_a_method_with_a_label_and_suffixes_in_any_order() -> None:
    names = ["rem", "rem+guard", "a=tent@cifar+smooth+guard+both", "remtta+batch4+smooth", "b=fast"]
    assert list(parse_variants(names).values()) == [
        MethodVariant("rem", "rem"),
        MethodVariant("rem+guard", "rem", guard=True),
        MethodVariant(names[2], "tent", "a", cifar=True, guard=True, ensemble=True, smooth=True),
        MethodVariant("remtta+batch4+smooth", "remtta", smooth=True, batch_size=4),
        MethodVariant("b=fast", "fast", "b"),
    ]


def test_a_variant_has_the_guard_and_the_prediction_of_its_method_or_those_added() -> None:
    rows = list(parse_variants(["rem", "rem+guard", "tent+both", "remtta", "fast"]).values())
    assert [row.is_guarded for row in rows] == [False, True, False, True, False]
    assert [row.action("stop") for row in rows] == ["off", "stop", "off", "stop", "off"]
    assert [row.action(None) for row in rows] == ["off", "rollback", "off", "rollback", "off"]
    assert [row.answer for row in rows] == ["adapted", "adapted", "both", "both", "both"]
    plain = [MethodVariant.parse(name).is_plain_source for name in ("source", "x=source", "source+smooth", "fast")]
    assert plain == [True, True, False, False]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["rem+none"], r"unknown suffix .*\+none"),
        (["rem+"], "unknown suffix"),
        (["rem+guard+guard"], r"rem\+guard\+guard: \+guard is there twice"),
        (["rem+batchN"], r"unknown suffix .*\+batchN"),
        (["rem+batch0"], r"rem\+batch0: \+batch needs a number of images from 1"),
        (["rem+batch"], r"rem\+batch: \+batch needs"),
        (["rem+batch1+batch4"], r"rem\+batch1\+batch4 has two batch sizes; leave one out"),
        (["+guard"], "unknown method"),
        (["rem@cifar"], "rem@cifar: @cifar, for settings for CIFAR, goes with tent, "),
        (["tent@imagenet"], "tent@imagenet: @cifar, for settings for CIFAR, goes with tent, "),
        (["rem", "rem"], "rem is named twice; LABEL=rem "),
        (["a=rem", "a=tent"], 'two methods are labelled "a"'),
        (["fast=rem"], '"fast" cannot label a method'),
        (["=rem"], '"" cannot label a method'),
        ([], "no method is named; choose remtta, "),
    ],
)
def test_names_that_mean_nothing_or_two_things_are_refused(names: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_variants(names)


def test_settings_for_cifar_are_settings_of_their_methods() -> None:
    for method, settings in CIFAR.items():
        config = method_config(method, settings, batch_size=200)
        assert {name: getattr(config, name) for name in settings} == settings
    assert set(CIFAR) <= set(METHOD_TABLE)


def test_settings_of_a_method_apply_to_its_rows_and_those_of_a_label_to_one() -> None:
    names = ("tent@cifar", "a=tent", "rem")
    configs = MethodsOptions(names, pairs=["a.lr=0.5", "tent.steps=2"]).configs(batch_size=64)
    assert [(config.lr, config.steps) for config in configs.values()] == [(1e-3, 2), (0.5, 2), (1e-3, 1)]
    with pytest.raises(UsageError, match=r"--set b.lr=1: write METHOD.KEY=VALUE with a method of --methods \(tent@"):
        MethodsOptions(names, pairs=["b.lr=1"]).configs(batch_size=64)


def test_a_row_has_the_rate_of_its_own_batch_size() -> None:
    names = ("remtta", "remtta+batch4", "remtta+batch16")
    rates = [config.lr for config in MethodsOptions(names).configs(batch_size=4).values()]
    assert rates[0] == rates[1] < rates[2]
