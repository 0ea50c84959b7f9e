def network(n):
    """Return the comparators of a network that sorts n values: pairs (i, j) of positions with i < j."""
    return [(j, j + 1) for i in range(n) for j in range(n - 1 - i)]
