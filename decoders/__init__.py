"""Accelerated decoding methods on a shared batching engine. Usable without the search layer.

Names are imported lazily, so that importing a request does not import torch.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
