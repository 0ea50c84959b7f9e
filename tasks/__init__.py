"""The tasks that come with this project: `from tot.tasks import GSM8K`. Each is imported when it is first used."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
