"""Write a self-contained HTML file: the trees of a run or an evaluation as data, and the viewer.

Texts are embedded as ASCII JSON with `<`, `>` and `&` escaped, in script blocks that browsers don't execute; the viewer
inserts them as text nodes. The content security policy allows one script and one style, by hash, and no network access.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

if TYPE_CHECKING:
    from tot.tree.tree import ThoughtTree

_SCRIPTS = ("text.js", "tree.js", "view.js", "panel.js", "search.js", "overview.js", "main.js")
_ESCAPED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})

Block = tuple[str, Any]
"""A block's id and its JSON data."""


def tree_page(tree: ThoughtTree, run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page of one tree, in pieces; `run` has the answer, usage and other fields of the run."""
    return page(tree.state(tree.root).question, [("tree-0", tree_block(tree, run))])


def tree_block(tree: ThoughtTree, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a tree's block: the saved tree with its run."""
    return tree.to_json() | {"run": dict(run)}


def page(title: str, blocks: Iterable[Block], live: bool = False) -> Iterator[str]:
    """Yield the page with the blocks "evaluation", "tree-0", …, in pieces, with one block in memory at a time.

    A `live` page has the block "live", and gets its trees from its server.
    """
    viewer = files("tot.report") / "viewer"
    style = (viewer / "page.css").read_text(encoding="utf-8")
    script = "\n".join((viewer / name).read_text(encoding="utf-8") for name in _SCRIPTS + ("live.js",) * live)
    template = Environment(autoescape=True).from_string((viewer / "page.html").read_text(encoding="utf-8"))
    return template.generate(
        title=" ".join(title.split())[:200].encode("utf-8", "replace").decode(),  # replace lone surrogates
        policy=(
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'" + "; connect-src 'self'" * live
        ),
        style=Markup(style),
        script=Markup(script),
        blocks=((name, Markup(embedded(data))) for name, data in blocks),
    )


def embedded(data: Any) -> str:
    """Encode JSON for an HTML script block: ASCII, without `<`, `>` and `&`; NaN and infinities become text."""
    return json.dumps(_finite(data), allow_nan=False, separators=(",", ":")).translate(_ESCAPED)


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return "–" if math.isnan(data) else "∞" if data > 0 else "−∞"
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def _hash(text: str) -> str:
    """Return the hash of a text as content security policies write it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
