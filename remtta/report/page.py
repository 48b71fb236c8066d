"""The page: HTML in which everything that files say is text, and no script but its own can run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from remtta.runs.reading import printable

MOST_BYTES = 5_000_000


def text(content: object) -> str:
    """What a file says, as text of a page."""
    return escape(printable(str(content)))


def section(title: str, parts: Iterable[str]) -> str:
    """Parts beside each other below a heading; nothing where all are empty."""
    shown = list(parts)
    return f'<section><h2>{text(title)}</h2><div class="runs">{"".join(shown)}</div></section>' if any(shown) else ""


def chart(name: str, svg: str) -> str:
    """A chart, named after what it is of."""
    return f"<figure>{svg}<figcaption>{text(name)}</figcaption></figure>"


def frames(name: str, shown: Iterable[tuple[Sequence[str], str]], note: str) -> str:
    """Small pictures, of each frame itself and perhaps of it masked, with captions."""
    figures = "".join(
        f"<figure>{_images(pictures, caption)}<figcaption>{text(caption)}</figcaption></figure>"
        for pictures, caption in shown
    )
    return f'<div><h3>{text(name)}</h3><p>{text(note)}</p><div class="frames">{figures}</div></div>'


def _images(addresses: Sequence[str], caption: str) -> str:
    if not addresses:
        return '<p class="gone">no longer readable</p>'
    words = (caption, f"{caption}; hatched: the patches that the mask hides")
    return "".join(f'<img src="{each}" alt="{text(said)}">' for each, said in zip(addresses, words, strict=False))


def facts(names: Sequence[str], columns: Sequence[Mapping[str, object]]) -> str:
    """A table of facts, with a column for each run."""
    rows = list(dict.fromkeys(name for column in columns for name in column))
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    lines = (
        f'<tr><th scope="row">{text(row)}</th>'
        + "".join(f"<td>{text(column.get(row, ''))}</td>" for column in columns)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def sortable(head: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """A table whose columns sort when their heads are clicked; all but the first hold numbers."""
    kinds = ["", *[' class="number"'] * (len(head) - 1)]
    heads = "".join(
        f'<th scope="col"{kind}><button type="button">{text(name)}</button></th>'
        for name, kind in zip(head, kinds, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return f'<th scope="row">{text(value)}</th>'
    return (
        '<td class="number" data-value=""></td>'
        if value is None
        else (f'<td class="number" data-value="{value!r}">{value:.1f}</td>')
    )


def whole(title: str, body: Iterable[str]) -> str:
    """The page."""
    style, script = (
        resources.files("remtta.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head><body><main><h1>{text(title)}</h1>"
        f"{''.join(body)}</main><script>{script}</script></body></html>\n"
    )
