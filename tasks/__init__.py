"""The tasks of this project: `from tot.tasks import GSM8K`. Each task is imported on first use."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
