"""The seeds of the instances of a search."""

SEEDS = range(5)
