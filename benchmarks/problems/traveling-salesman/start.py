def next_city(position, start, cities):
    """Return the index in `cities` of the city to visit next, from the current `position`."""
    return min(range(len(cities)), key=lambda i: (cities[i][0] - position[0]) ** 2 + (cities[i][1] - position[1]) ** 2)
