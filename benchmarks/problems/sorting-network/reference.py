"""odd-even mergesort"""


def network(n):
    """Batcher's network for the next power of two, without the comparators beyond n."""
    pairs, size = [], 1
    while size < n:
        size *= 2
    step = 1
    while step < size:
        distance = step
        while distance >= 1:
            for first in range(distance % step, size - distance, 2 * distance):
                for i in range(min(distance, size - first - distance)):
                    low, high = first + i, first + i + distance
                    if low // (2 * step) == high // (2 * step) and high < n:
                        pairs.append((low, high))
            distance //= 2
        step *= 2
    return pairs
