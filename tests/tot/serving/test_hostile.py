"""No body makes a server of searches fail: it answers, or refuses in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(max_size=12) | st.sampled_from(["{{ 7 * 7 }}", "<|im_end|>", "</think>", "\x00"])
SCALAR = st.none() | st.booleans() | st.integers(-3, 3000) | st.floats() | TEXT
ANY = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "image_url"])}, optional={"text": ANY})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT},
    optional={"reasoning_content": ANY},
)
BAD_MESSAGE = st.fixed_dictionaries({"role": TEXT, "content": TEXT | st.lists(PART, max_size=2)}) | ANY
QUESTION = st.builds(lambda text: {"role": "user", "content": text}, TEXT)
MESSAGES = st.builds(lambda turns, last: [*turns, last], st.lists(MESSAGE, max_size=3), QUESTION)
FIELDS = {
    "model": st.sampled_from(["chat", "chat:tree", "chat:none"]),
    "messages": st.lists(BAD_MESSAGE, max_size=3) | ANY,
    "stream": st.booleans() | SCALAR,
    "max_tokens": SCALAR,
    "max_completion_tokens": SCALAR,
    "reasoning_effort": st.sampled_from(["low", "high", "none"]) | SCALAR,
    "reasoning": ANY,
    "x_tot": st.fixed_dictionaries({}, optional={"seconds": SCALAR, "until": SCALAR}) | ANY,
    "temperature": st.floats(),
    "top_p": st.floats(0, 2),
    "seed": SCALAR,
    "stop": st.lists(TEXT, max_size=3) | TEXT | ANY,
    "text": ANY,
    "metadata": ANY,
}
CHANGES = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name]))
BODY = st.builds(
    lambda messages, changes: {"model": "chat:vote", "messages": messages, **dict(changes)},
    MESSAGES,
    st.lists(CHANGES, max_size=2),
)


@pytest.fixture(scope="module")
def url(searching: Any, chat: Any) -> Iterator[str]:
    with closing(searching(chat("Paris", "Lyon.\n\n"))) as server:
        yield server.url


@given(body=BODY | ANY, responses=st.booleans())
def test_every_body_is_answered_or_refused(url: str, body: Any, responses: bool) -> None:
    if responses and isinstance(body, dict) and "messages" in body:
        body = {**body, "input": body["messages"]}
        del body["messages"]
    path = "/v1/responses" if responses else "/v1/chat/completions"
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    reply = httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=60)
    if reply.status_code == 200:
        assert "error" not in reply.text or '"error":null' in reply.text
        return
    assert reply.status_code in (400, 404)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
