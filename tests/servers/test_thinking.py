"""A model of a server that thinks: its thinking is closed at its budget, and its answer is the local decoder's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import Message, Request, Sampling, load_decoder

pytestmark = [pytest.mark.real, pytest.mark.servers]

QUESTION = (Message(role="user", content="Describe the sea in three sentences."),)


def test_thinking_on_vllm_is_closed_and_answered_as_locally(
    vllm_thinker: Any, thinking_weights: Path, remote: Callable[..., Any]
) -> None:
    request = Request(prompt=QUESTION, sampling=Sampling(max_tokens=24, thinking=12, ignore_eos=True))
    with load_decoder("ar", str(thinking_weights), dtype="fp32") as local:
        (here,) = local.generate([request])
    (there,) = remote(vllm_thinker).generate([request])
    kinds = ["thinking", "closing", "exact"]
    assert [part.kind for part in there.parts] == [part.kind for part in here.parts] == kinds
    assert there.thinking.startswith(here.thinking)
    assert [part.tokens for part in there.parts] == [0, 0, 24]
    assert len(there.text.split()) > 5
    assert "think>" not in there.text


@pytest.mark.parametrize("thinking", ["off", 20])
def test_llama_servers_fields_are_accepted(llama_server: Any, thinking: Any) -> None:
    request = Request(prompt=QUESTION, sampling=Sampling(max_tokens=8, thinking=thinking))
    with load_decoder("openai", llama_server.model, base_url=llama_server.url, server="llama-server") as decoder:
        (completion,) = decoder.generate([request])
    assert completion.text
