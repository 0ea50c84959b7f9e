"""Write given texts in the format of trajectories, for `tot train cllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tot.decoders.engine.text import TextCodec
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.request import Request
from tot.decoders.training.cllm.trajectories import begin, shards

_PER_SHARD = 1000
_NO_WINDOWS: dict[str, list[Any]] = {"starts": [], "points": [], "corrected": []}


def write_texts(
    loaded: LoadedModel,
    texts: Iterable[tuple[Request, str]],
    out: Path,
    tell: Callable[[int], None] = lambda texts: None,
) -> None:
    """Write pairs of (request, expected completion).

    They have no windows, so training on them has only the AR loss.
    """
    begin(out, {"given": True}, loaded)
    codec = TextCodec(loaded.tokenizer)

    def rows_of(_: int, batch: Sequence[tuple[Request, str]]) -> list[dict[str, Any]]:
        return [
            {
                "prompt": codec.encode_prompt(request.prompt),
                "response": [*codec.encode(text), codec.end_of(request)],
                **_NO_WINDOWS,
            }
            for request, text in batch
        ]

    done = 0
    for batch, _ in shards(out, texts, _PER_SHARD, rows_of):
        done += len(batch)
        tell(done)
