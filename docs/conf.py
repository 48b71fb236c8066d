"""The documents as a site of HTML pages: `sphinx-build -W -c docs . site`, with `pip install ".[docs]"`."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

from remtta import __version__

project = "remtta"
html_title = f"remtta {__version__}"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True
_KINDS = {
    "Tutorial": ["tutorial"],
    "How to": [
        "install",
        "reliability",
        "scale",
        "evaluation",
        "doctor",
        "estimates",
        "clip",
        "onnx",
        "export",
        "report",
    ],
    "Reference": ["options", "methods", "models", "files", "corruptions", "api"],
    "Explanation": ["guard", "results", "negative_results", "performance", "architecture"],
    "Parts": ["part_baselines", "part_zero_shot", "part_formats", "part_deployment", "part_lab"],
}


def setup(app: Sphinx) -> None:
    """Give the README, which is shown as it is elsewhere, the site's list of pages, and the site its front page."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _add_front_page)


def _add_contents(_: Sphinx, name: str, content: list[str]) -> None:
    if name == root_doc:
        parts = {kind: [f"docs/{page}" for page in pages] for kind, pages in _KINDS.items()}
        for kind, pages in {**parts, "Project": ["CHANGELOG", "CONTRIBUTING", "SECURITY"]}.items():
            content[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {kind}", "", *pages, "```", ""])


def _add_front_page(app: Sphinx, failure: Exception | None) -> None:
    if failure is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")
