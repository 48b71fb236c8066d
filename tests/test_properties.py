"""Whatever a user, a pipe or a damaged file holds: it is read, or refused in a line of its own."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.deltas.delta import Delta, apply_delta, load_delta, save_delta
from remtta.errors import RemttaError, UsageError
from remtta.lab.corruptions.options import CorruptOptions, parse_corruptions
from remtta.lab.evaluation.datasets import read_image_list
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.models.checkpoints import load_checkpoint
from remtta.models.info import read_labels
from remtta.models.tensor_files import CHECKSUM, read_tensors, save_tensors, state_sha256
from remtta.options.option import option_fields, read_pairs, read_size, read_value
from remtta.streams.listing import natural_key
from tests.conftest import tiny_vit
from tests.streams.pipes import paths_in

TEXTS = st.text(max_size=40) | st.from_regex(r"[0-9,.\-+eE_ ]{0,12}", fullmatch=True) | st.just("9" * 5000)


@contextlib.contextmanager
def read_or_refused() -> Iterator[None]:
    """The only ways a parser may end: with a value, or with a message."""
    try:
        yield
    except RemttaError as error:
        assert str(error).strip()


@given(st.integers(0, 2**50), st.sampled_from(["", "K", "m", "GiB", "TB"]))
def test_sizes_mean_what_they_say(number: int, unit: str) -> None:
    power = " KMGT".index(unit[:1].upper() or " ")
    assert read_size(f" {number}{unit} ") == number * 1024**power


[MASK_RATIOS] = [member for member in option_fields(REMConfig) if member.name == "mask_ratios"]


def mask_ratios_in(text: str) -> tuple[float, ...]:
    config = method_config("rem", {"mask_ratios": read_value(MASK_RATIOS, text)}, batch_size=8)
    assert isinstance(config, REMConfig)
    return config.mask_ratios


@pytest.mark.parametrize(
    "read",
    [
        lambda text: read_size(text) >= 0,
        lambda text: mask_ratios_in(text)[0] == 0,
        lambda text: adapted_norms(backbone_of(tiny_vit()), text),
        lambda text: CorruptOptions(corruptions=parse_corruptions(text)).corruptions,
    ],
    ids=["size", "mask ratios", "block numbers", "corruptions"],
)
@given(text=TEXTS)
@example(text="9" * 400)
def test_any_text_is_read_or_refused(read: Callable[[str], object], text: str) -> None:
    with read_or_refused():
        assert read(text)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6, unique=True).map(sorted))
def test_mask_ratios_come_back_as_written(ratios: list[float]) -> None:
    assert mask_ratios_in(",".join(map(repr, [0.0, *ratios]))) == (0.0, *ratios)


@given(st.lists(TEXTS | st.builds("{}={}".format, st.sampled_from(["lr", "a", "if"]), TEXTS), max_size=3))
@example(["a=" + "(" * 1000])
@example(["a=" + "-" * 20000 + "1"])
def test_any_pairs_are_read_or_refused(pairs: list[str]) -> None:
    with read_or_refused():
        assert all(name.isidentifier() for name in read_pairs(pairs, "--set"))


@pytest.mark.parametrize("value", [["0", "a"], 10**400, {"a": 1}, [[0.0]]])
def test_mask_ratios_that_are_no_numbers_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="mask_ratios must be numbers separated by commas"):
        method_config("rem", {"mask_ratios": value}, batch_size=8)


LITERALS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)


@given(st.sampled_from([name for name in METHOD_TABLE if name != "source"]), st.data())
def test_settings_of_methods_are_taken_or_refused(name: str, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(METHOD_TABLE[name].config.__dataclass_fields__)))
    value = data.draw(LITERALS | st.lists(LITERALS, max_size=3) | st.lists(LITERALS, max_size=3).map(tuple))
    with read_or_refused():
        config = method_config(name, {key: value}, batch_size=8)
        found = getattr(config, key)
        assert not isinstance(found, float) or not math.isnan(found)


NAMES = st.binary(min_size=1, max_size=30).filter(lambda name: b"\0" not in name)


@given(st.lists(NAMES, max_size=8), st.sampled_from([b"\0", b"\n", b"\r\n"]))
def test_any_name_comes_through_a_pipe(names: list[bytes], end: bytes) -> None:
    valid = [name for name in names if end == b"\0" or not (b"\n" in name or name.endswith(b"\r"))]
    content = b"".join(name + end for name in valid)
    assert [os.fsencode(name) for name in paths_in(content, end == b"\0")] == valid


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_on_a_pipe_are_a_crash(content: bytes, null_separated: bool) -> None:
    with read_or_refused():
        assert all(paths_in(content, null_separated))


@given(st.lists(st.text(max_size=12), min_size=3, max_size=3))
def test_natural_order_is_total(names: list[str]) -> None:
    first, second, third = sorted(names, key=natural_key)
    assert natural_key(first) <= natural_key(second) <= natural_key(third)
    assert (natural_key(names[0]) == natural_key(names[1])) == (names[0] == names[1])


@given(st.binary(max_size=100) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_label_file_and_image_list_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(content)
    with read_or_refused():
        labels = read_labels(file)
        assert labels is not None and not any("\n" in label for label in labels)
    with read_or_refused():
        assert all(name.count("/") == 1 for name in read_image_list(file))


HEADER_SIZE = 8  # bytes: a little-endian number, then so much JSON


@given(data=st.data())
def test_a_damaged_delta_is_refused_or_changes_the_model_as_it_says(tmp_path: Path, data: st.DataObject) -> None:
    vit, file = tiny_vit(), tmp_path / "delta.safetensors"
    tensors = {name: torch.ones_like(parameter) for name, parameter in adapted_norms(backbone_of(vit), "0").items()}
    save_delta(file, Delta(tensors=tensors, model="vit", base_sha256=state_sha256(vit), method="rem"))
    header, _ = read_tensors(file)
    del header[CHECKSUM]  # by which any damage would be noticed before what is tested here
    save_tensors(file, tensors, header, checksum=False)
    content = bytearray(file.read_bytes())
    header_end = HEADER_SIZE + int.from_bytes(content[:HEADER_SIZE], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    try:
        delta = load_delta(file)
        apply_delta(vit, delta)
    except RemttaError as error:
        assert str(error).strip()
        assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())
    else:
        for name, tensor in vit.state_dict().items():
            assert torch.equal(tensor, before[name] + delta.tensors[name] if name in delta.tensors else before[name])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "U8", "F8_E4M3", "X", 3]),
        "shape": st.lists(st.integers(-1, 2**62) | st.integers(0, 8), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 64) | st.integers(-1, 2**63), min_size=2, max_size=2) | JSON,
    }
)


@given(
    header=st.dictionaries(st.sampled_from(["blocks.0.norm1.weight", "x", "__metadata__", ""]), ENTRY | JSON),
    content=st.binary(max_size=64),
    size=st.none() | st.integers(0, 2**64 - 1),
)
@pytest.mark.parametrize("read", [lambda vit, file: load_delta(file), load_checkpoint], ids=["delta", "checkpoint"])
def test_invented_safetensors_headers_are_refused_and_change_nothing(
    tmp_path: Path, read: Any, header: dict[str, Any], content: bytes, size: int | None
) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "invented.safetensors"
    file.write_bytes((len(text) if size is None else size).to_bytes(HEADER_SIZE, "little") + text + content)
    vit = tiny_vit()
    before = state_sha256(vit)
    with pytest.raises(RemttaError):
        read(vit, file)
    assert state_sha256(vit) == before
