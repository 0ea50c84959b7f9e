"""Tokens in, tokens out, fast: decoding methods over one packed engine. Useful without the search layer.

Names are imported when first used, so that reading a request costs no import of torch.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
