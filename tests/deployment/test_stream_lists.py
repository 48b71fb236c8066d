"""Lists of streams."""

from pathlib import Path

import pytest

from remtta.deployment.stream_lists import read_sources
from remtta.errors import UsageError


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_list_has_names_and_addresses_in_its_order(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "cams.txt"
    path.write_text(
        "# the yard\n\nyard=rtsp://user:pw@10.0.0.7/live?channel=1#main\r\n  gate-2 = my clips/a=b.mp4 \n0=0\n",
        encoding,
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
        (b"rtsp://user:secret@host/live?a=1", "line 1: a name has at most 64 letters"),
        (b"a=\n", "line 1 is not a name and an address"),
        (b"../up=secret", "line 1: a name has at most 64"),
        ("Süd Tor=1".encode(), 'line 1: "Süd Tor" is no name; a name has at most 64'),
        (b"site.json=secret", 'line 1: "site.json" is no name; a name has at most 64'),
        (b"a=1\n\nA=secret\n", "line 3: there is a stream called A already"),
        (b"a=-\n", "a cannot be standard input"),
        (b"\xff\xfe\x00", "is not UTF-8 text.*; save it as UTF-8"),
        (None, "cams.txt is not a file; --streams takes a list of sources"),
    ],
)
def test_malformed_lists_are_refused_in_a_line_without_an_address(
    content: bytes | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "cams.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=problem) as refusal:
        read_sources(path)
    assert str(path) in str(refusal.value) and "secret" not in str(refusal.value)
