"""Mean length of tours through 60 random cities."""

import math
import random

from candidate import next_city
from instances import SEEDS


def tour(seed):
    rng = random.Random(f"cities {seed}")
    cities = [(rng.random(), rng.random()) for _ in range(60)]
    start = position = cities.pop(0)
    length = 0.0
    while cities:
        chosen = next_city(position, start, list(cities))
        if type(chosen) is not int or not 0 <= chosen < len(cities):
            raise ValueError(f"next_city returned {chosen!r}: it must return an index from 0 to {len(cities) - 1}")
        length += math.dist(position, cities[chosen])
        position = cities.pop(chosen)
    return length + math.dist(position, start)


print(sum(map(tour, SEEDS)) / len(SEEDS))
