"""Errors of the server behind a proxy: their statuses, and messages without its address."""

from __future__ import annotations

from typing import Any

import pytest

from tot.decoders.errors import ContextError, RefusedError, ServerError, TotError


def failing(chat: Any, error: TotError) -> Any:
    class Failing(chat):  # type: ignore[misc]
        async def _all(self, request: Any, meter: Any) -> Any:
            raise error

    return Failing("a")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_server_behind_has_a_status_of_its_own(serve: Any, chat: Any, user: Any, stream: bool) -> None:
    long = "the prompt exceeds the context of 100 tokens"
    for error, status, code, message in (
        (RefusedError("http://10.0.0.7 rejects", "no such stop"), 400, None, "rejects the request: no such stop"),
        (RefusedError("http://10.0.0.7", "out of memory", 502), 502, None, "fails: out of memory"),
        (RefusedError("http://10.0.0.7", long), 400, ContextError.code, f"rejects the request: {long}"),
        (ServerError("http://10.0.0.7: resume with --resume"), 502, "upstream_error", "fails"),
        (ServerError("http://10.0.0.7", "loading", 503, 7), 503, "upstream_error", "fails: loading"),
        (ServerError("http://10.0.0.7", "slow", 429, 300), 429, "upstream_error", "rejects the request: slow"),
    ):
        reply = serve(failing(chat, error)).post(model="chat", messages=user("a?"), stream=stream)
        body = reply.json()["error"]
        assert (reply.status_code, body["code"], body["message"]) == (status, code, f"the model's server {message}")
        assert reply.headers.get("retry-after") == {503: "7", 429: "300"}.get(status)
