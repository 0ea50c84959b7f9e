"""The tasks that come with this project: `from tot.tasks import GSM8K`. Each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tot.tasks.blocksworld import Blocksworld, DirectBlocksworld
    from tot.tasks.creative_writing import CreativeWriting
    from tot.tasks.game24 import Game24
    from tot.tasks.gsm8k import GSM8K
    from tot.tasks.multiple_choice import MultipleChoice

_MODULE_OF = {
    "Blocksworld": "blocksworld",
    "CreativeWriting": "creative_writing",
    "DirectBlocksworld": "blocksworld",
    "GSM8K": "gsm8k",
    "Game24": "game24",
    "MultipleChoice": "multiple_choice",
}

__all__ = ["GSM8K", "Blocksworld", "CreativeWriting", "DirectBlocksworld", "Game24", "MultipleChoice"]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
