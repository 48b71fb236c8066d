"""Lists of sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from remtta.errors import UsageError
from remtta.streams.lists import read_sources


def test_a_list_has_names_and_addresses_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "cams.txt"
    path.write_text(
        "\ufeff# the yard\n\nyard=rtsp://user:pw@10.0.0.7/live?channel=1#main\r\n  gate-2 = my clips/a=b.mp4 \n0=0\n"
    )
    assert list(read_sources(path).items()) == [
        ("yard", "rtsp://user:pw@10.0.0.7/live?channel=1#main"),
        ("gate-2", "my clips/a=b.mp4"),
        ("0", "0"),
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "names no source; write name=address on each line"),
        (b"# only this\n", "names no source"),
        (b"a=1\nrtsp://user:secret@host/live\n", "line 2 is not a name and an address"),
        (b"rtsp://user:secret@host/live?a=1", "line 1: a name has letters, digits"),
        (b"a=\n", "line 1 is not a name and an address"),
        (b"../up=secret", "line 1: a name has letters"),
        (b"site.json=secret", "line 1: a name has letters"),
        (b"a=1\n\nA=secret\n", "line 3: there is a stream called A already"),
        (b"a=-\n", "a cannot be standard input"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_other_lists_are_refused_in_a_line_that_tells_no_address(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "cams.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=problem) as refusal:
        read_sources(path)
    assert str(refusal.value).startswith(str(path)) and "secret" not in str(refusal.value)


def test_a_list_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such file"):
        read_sources(tmp_path / "nowhere")
