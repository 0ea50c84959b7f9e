"""apparent tardiness cost (Vepsalainen and Morton, 1987)"""

import math


def priority(duration, due, weight, now):
    """Weight per duration, discounted by the slack in units of twice the mean duration."""
    slack = max(0, due - duration - now)
    return weight / duration * math.exp(-slack / 100)
