"""Build the HTML page; content of files is escaped, and only the page's own script can run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from remtta.runs.reading import printable

MAX_BYTES = 5_000_000


def text(content: object) -> str:
    """Escape content for the page."""
    return escape(printable(str(content)))


def section(title: str, parts: Iterable[str]) -> str:
    """Return a heading with parts side by side below it, or nothing if all parts are empty."""
    shown = list(parts)
    return f'<section><h2>{text(title)}</h2><div class="runs">{"".join(shown)}</div></section>' if any(shown) else ""


def figure(caption: str, picture: str) -> str:
    """Return a chart or an image with a caption."""
    return f"<figure>{picture}<figcaption>{text(caption)}</figcaption></figure>"


def frames(name: str, shown: Iterable[tuple[str | None, str]], note: str) -> str:
    """Return thumbnails with captions."""
    figures = "".join(figure(caption, _image(address, caption)) for address, caption in shown)
    return f'<div><h3>{text(name)}</h3><p>{text(note)}</p><div class="frames">{figures}</div></div>'


def _image(address: str | None, caption: str) -> str:
    if address is None:
        return '<p class="gone">no longer readable</p>'
    return f'<img src="{address}" alt="{text(caption)}">'


def facts(names: Sequence[str], columns: Sequence[Mapping[str, object]]) -> str:
    """Return a table of facts, with a column per run."""
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


def sortable(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns can be sorted by clicking their heads, all but the first by the number in a cell."""
    kinds = ["", *[' class="number"'] * (len(head) - 1)]
    heads = "".join(
        f'<th scope="col"{kind}><button type="button">{text(name)}</button></th>'
        for name, kind in zip(head, kinds, strict=True)
    )
    lines = "".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(map(_number, cells))}</tr>' for name, *cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def _number(cell: str) -> str:
    found = re.search(r"-?[\d.]+", cell)
    return f'<td class="number" data-value="{found[0] if found else ""}">{text(cell)}</td>'


def whole(title: str, body: Iterable[str]) -> str:
    """Return the whole page."""
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
