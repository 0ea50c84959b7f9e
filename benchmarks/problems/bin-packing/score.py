"""Mean excess on Weibull instances of 1,000 items (Romera-Paredes et al., 2024), in percent."""

import random

from candidate import priority
from instances import SEEDS

CAPACITY = 100


def excess(seed):
    rng = random.Random(f"weibull {seed}")
    items = [min(CAPACITY, max(1, round(rng.weibullvariate(45, 3)))) for _ in range(1000)]
    bins, known = [], {}
    for item in items:
        best = None
        for number, room in enumerate(bins):
            if room < item:
                continue
            if (item, room) not in known:
                known[item, room] = float(priority(item, room))
            if best is None or known[item, room] > known[item, bins[best]]:
                best = number
        if best is None:
            bins.append(CAPACITY - item)
        else:
            bins[best] -= item
    return 100 * (len(bins) * CAPACITY / sum(items) - 1)


print(sum(map(excess, SEEDS)) / len(SEEDS))
