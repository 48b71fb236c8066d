"""docs/methods.md names settings that exist, for methods that have a use for them."""

import re
from pathlib import Path

from remtta.methods.settings import renamed
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.options.option import read_pairs

PAGE = (Path(__file__).parent.parent.parent / "docs" / "methods.md").read_text()
BEFORE, _, OFFICIAL = PAGE.partition("## The official implementations")
COMPARED = BEFORE[BEFORE.index("## Compared with the official implementations") :]
PLAIN = {"source", "center", "pseudo-label", "supervised", "vdp"}  # that no official code is said to be of
PRESETS = {"remtta", "light", "fast", *renamed.METHODS}


def rows() -> list[tuple[list[str], str]]:
    """Methods, and what to set for their official behaviour, of every row of the table."""
    cells = [line.strip("| ").split(" | ") for line in OFFICIAL.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([\w-]+)`", first), last) for first, _, last in cells]


def settings() -> list[tuple[str, str]]:
    """Every method with every `KEY=VALUE` that its rows name; of `--set A=1 --set B=2`, both in one text."""
    return [
        (method, re.sub(r"--set |`", "", text))
        for methods, last in rows()
        for method in methods
        for text in re.findall(r"`--set [^`]*`", last)
    ]


def test_a_setting_for_the_official_behaviour_exists_and_changes_something() -> None:
    for method, pairs in settings():
        given = read_pairs(pairs.split(), "--set")
        config = method_config(method, given, batch_size=64 + 1)
        assert all(getattr(config, name) == value for name, value in given.items()), method
        default = method_config(method, {}, batch_size=64 + 1)
        assert all(getattr(config, name) != getattr(default, name) for name in given), method


def test_settings_for_other_data_and_models_are_those_of_the_codes() -> None:
    named = {f"{method} {pairs}" for method, pairs in settings()}
    assert named >= {f"{method} lr=2.5e-4" for method in ("tent", "eta", "eata", "sar", "deyo", "sar-come")}
    assert all(f"`{method}@cifar`" in PAGE for method in ("tent", "eata", "cotta", "petal", "vida", "memo"))
    assert named >= {"watt order=parallel rounds=50", "watt lr=1e-4", "deyo plpd_margin=0.3", "eta max_cosine=0.04"}
    assert not any(each.startswith("rdumb entropy_margin") for each in named)


def test_every_method_with_an_official_code_has_its_rows_and_is_compared_with_it() -> None:
    official = METHOD_TABLE.keys() - PLAIN - PRESETS
    assert {method for methods, _ in rows() for method in methods} == official
    assert official <= set(re.findall(r"`([\w-]+)`", COMPARED))


def test_every_setting_that_the_page_names_exists() -> None:
    known = {field for kind in (named.config for named in METHOD_TABLE.values()) for field in kind.__dataclass_fields__}
    named = set(re.findall(r"(?:--set |`)(?:[\w-]+\.)?([a-z]\w*)=", PAGE))
    assert named >= {"prediction_step", "order", "masking"} and named <= known


def test_the_page_names_every_method_with_running_statistics() -> None:
    defaults = {name: method_config(name, {}, batch_size=64).bn for name in METHOD_TABLE.keys() - renamed.METHODS}
    (named,) = re.findall(r"((?:`[\w-]+`,?\s+)+)and the guard's source model use the checkpoint's running", PAGE)
    assert set(re.findall(r"`([\w-]+)`", named)) == {name for name, bn in defaults.items() if bn == "running"}
