"""Total number of comparators of networks that sort 2 to 12 values, checked by the 0-1 principle."""

from candidate import network

SIZES = range(2, 13)


def comparators(n):
    pairs = network(n)
    if not isinstance(pairs, list):
        raise TypeError(f"network({n}) returned {type(pairs).__name__}: it must return a list")
    words = set(range(1 << n))  # one bit for each position
    for pair in pairs:
        i, j = pair
        if type(i) is not int or type(j) is not int or not 0 <= i < j < n:
            raise ValueError(f"network({n}) contains {pair!r}: a comparator is (i, j) with 0 <= i < j < {n}")
        words = {word ^ (1 << i | 1 << j) if word >> i & 1 and not word >> j & 1 else word for word in words}
    if len(words) > n + 1:
        raise ValueError(f"network({n}) does not sort all values")
    return len(pairs)


print(sum(map(comparators, SIZES)))
