import math


def terms(t, x, v):
    """Return the terms of the formula for the acceleration."""
    return [
        x,
        v,
    ]
