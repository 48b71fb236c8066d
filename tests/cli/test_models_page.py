"""`remtta models`, and docs/models.md, whose table says the same.

`python -m tests.cli.test_models_page` writes the table anew. With `check`, as .ci/run asks, it fails where that would
change anything: the half a minute that all kinds take is too much for the tests, which look at some.
"""

import functools
import json
import sys
from pathlib import Path

import pytest
import timm

from remtta.backbones.families import FAMILIES, modules_without_family
from remtta.cli.listings import methods_text
from remtta.methods.support import Support, kinds, refused_methods, support_in, support_of
from remtta.methods.table import METHOD_SUMMARIES
from remtta.zero_shot import METHODS as ZERO_SHOT
from tests.command import remtta_here

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- from the program -->\n", "<!-- to here -->"


@functools.cache
def some() -> list[Support]:
    """One kind of model; .ci/run has all of them compared."""
    return [support_of(model, kind) for model, kind in list(kinds().items())[:1]]


def row(each: Support) -> str:
    methods = methods_text(each).removeprefix("all methods but ").removesuffix("zero-shot ones").rstrip(", ")
    return f"| `{each.model}` | {each.kind} | {', '.join(each.masks)} | {methods} |"


def page() -> str:
    """The page, with what the program says now between its marks."""
    text = PAGE.read_text()
    everything = [support_of(model, kind) for model, kind in kinds().items()]
    table = ["| timm model | kind | REM masks by | methods refused |", "|---|---|---|---|", *map(row, everything)]
    return text[: text.index(BEGIN) + len(BEGIN)] + "\n".join(table) + "\n" + text[text.index(END) :]


def test_the_page_has_what_the_program_says_of_some_families() -> None:
    text = PAGE.read_text()
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    assert set(map(row, some())) <= set(lines)
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(kinds())
    families = list(dict.fromkeys(FAMILIES.values()))
    for family in families:
        assert getattr(family, "kinds", {}), family
    names = [name for family in families for name in getattr(family, "kinds", {}).values()]
    assert len(names) == len(set(names))
    for support in some():
        assert support.adapted and support.masks and {"source", "tent", "rem", "sar"} <= set(support.methods), support
    assert {"cait", "mlp_mixer"} <= set(modules_without_family())


def test_a_part_of_a_name_chooses_kinds(capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("models", "SigLIP") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "vit_base_patch16_siglip_224: ViT with attention pooling (SigLIP)"
    told = "masks by attention or features; blocks 0-11 of 12; all methods but norm, foa, zero-shot ones; timm has"
    assert lines[1].strip().startswith(told)


def test_of_one_model_it_tells_what_is_refused_and_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("models", "eva02_tiny_patch14_224") == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "REM masks by: attention (default), features, random" in told
    assert "remtta adapts the norms of: blocks 0-11 of 12, " in told
    assert "not foa: FOA changes the number of tokens" in told
    assert "not watt, rem-watt, clipartt, tpt: the method is for zero-shot models" in told
    assert remtta_here("models", "test_vit_relpos") == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "REM masks by: random remtta adapts the norms of: blocks 0-8 of 9, " in told and "tent, rem" in told
    assert remtta_here("models", "test_vit.r160_in1k", "--json") == 0
    (found,) = json.loads(capfd.readouterr().out)
    assert found["model"] == "test_vit" and list(found["refused"]) == ["norm", *ZERO_SHOT]
    assert found["methods"] == [name for name in METHOD_SUMMARIES if name not in found["refused"]]
    assert found["adapts"] == f"blocks 0-{found['adapted'][-1]} of {found['blocks']}"


@pytest.mark.parametrize(
    ("name", "masks", "adapts"),
    [("mixer_s32_224", (), "blocks 0-7 of 8"), ("cait_xxs24_224", ("features",), "blocks 0-23 of 24")],
)
def test_models_of_no_family_are_examined(name: str, masks: tuple[str, ...], adapts: str) -> None:
    model = timm.create_model(name, img_size=64)
    refused = refused_methods(model, ["tent", "rem", "foa"])
    support = support_in(model, name, refused=refused)
    assert (support.masks, support.adapts, list(refused)) == (masks, adapts, ["foa"])


@pytest.mark.parametrize(
    ("adapted", "told"), [((0, 1, 2), "blocks 0-2 of 4"), ((0, 2, 3), "blocks 0,2-3 of 4"), ((), "nothing")]
)
def test_blocks_are_printed_in_the_form_of_adapt_layers(adapted: tuple[int, ...], told: str) -> None:
    assert Support("m", "k", True, blocks=4, adapted=adapted).adapts == told


if __name__ == "__main__":
    content = page()
    if sys.argv[1:] == ["check"]:
        sys.exit(None if content == PAGE.read_text() else "docs/models.md is old: python -m tests.cli.test_models_page")
    PAGE.write_text(content)
