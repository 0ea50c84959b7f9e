"""One HTML file that needs nothing else: the trees of a run or an evaluation as data, and what draws them.

Texts go into the page as JSON in ASCII, `<`, `>` and `&` escaped, in blocks that browsers don't run; the page makes
text nodes of them. Its policy allows one script and one style, by their hashes, and no address at all.
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
"""A block's id, and JSON data."""


def tree_page(tree: ThoughtTree, run: Mapping[str, Any]) -> Iterator[str]:
    """The page of one tree, in pieces; `run` is what is known of it besides: answer, usage, …"""
    return page(tree.state(tree.root).question, [("tree-0", tree_block(tree, run))])


def tree_block(tree: ThoughtTree, run: Mapping[str, Any]) -> dict[str, Any]:
    """A tree as the page takes it: as it is saved, with the run it is of."""
    return tree.to_json() | {"run": dict(run)}


def page(title: str, blocks: Iterable[Block]) -> Iterator[str]:
    """The page that holds the blocks "evaluation", "tree-0", …, in pieces, so that one block at a time is in memory."""
    viewer = files("tot.report") / "viewer"
    style = (viewer / "page.css").read_text(encoding="utf-8")
    script = "\n".join((viewer / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    template = Environment(autoescape=True).from_string((viewer / "page.html").read_text(encoding="utf-8"))
    return template.generate(
        title=" ".join(title.split())[:200].encode("utf-8", "replace").decode(),  # half a surrogate has no encoding
        policy=(
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        style=Markup(style),
        script=Markup(script),
        blocks=((name, Markup(embedded(data))) for name, data in blocks),
    )


def embedded(data: Any) -> str:
    """JSON that can stand in an HTML script block: ASCII, without `<`, `>` and `&`; infinities become texts."""
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
    """How a content security policy names a text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
