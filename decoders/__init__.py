"""Tokens in, tokens out, fast: decoding methods over one packed engine. Useful without the search layer.

Names are imported when first used, so that reading a request costs no import of torch.
"""

from tot.decoders.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
