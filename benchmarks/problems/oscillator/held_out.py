"""The beginnings of other motions, which replace `instances.py` to rate the result of a search."""

STARTS = [(-0.7, -0.3), (1.2, 1.0), (2.0, 0.0), (-1.6, -1.0)]
