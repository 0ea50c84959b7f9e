"""The tasks that come with this project: `from tot.tasks import GSM8K`. Each is imported when it is first used."""

from tot.decoders.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
