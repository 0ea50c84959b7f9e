"""The seeds of other instances, which replace `instances.py` to rate the result of a search."""

SEEDS = range(100, 120)
