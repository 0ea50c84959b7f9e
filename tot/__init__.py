"""Reasoning with trees of thoughts on language models that you run yourself.

    from tot import solve, BFS
    solution = solve("gsm8k", "Natalia sold clips to 48 …", model="smollm2-135m", search=BFS(thoughts=3, breadth=3))

Names are imported when first used: `import tot` is fast, and `tot.decoders` does not need the search layer.
"""

try:
    import lazy_loader as lazy

    __getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
except KeyboardInterrupt:  # the command `tot` imports the package before it handles Ctrl-C
    raise SystemExit(130) from None
