"""Error of a formula with fitted weights, for a driven nonlinear oscillator as in LLM-SR (Shojaee et al., 2025).

The weights are fitted to one half of each motion. The score is the error on the other half.
"""

import json
import math
from operator import mul

from candidate import terms
from instances import STARTS

STEP, POINTS, EVERY = 0.01, 100, 20
TERMS = 10
SMALLEST = 1e-8


def acceleration(t, x, v):
    return 0.8 * math.sin(t) - 0.5 * v**3 - 0.2 * x**3 - 0.5 * x * v - x * math.cos(x)


def motion(x, v):
    """Return (t, x, v) of a motion at regular times, by the midpoint method."""
    points = []
    for i in range(POINTS * EVERY):
        t = i * STEP
        if i % EVERY == 0:
            points.append((t, x, v))
        half_x, half_v = x + v * STEP / 2, v + acceleration(t, x, v) * STEP / 2
        x, v = x + half_v * STEP, v + acceleration(t + STEP / 2, half_x, half_v) * STEP
    return points


def values(point):
    found = terms(*point)
    if not isinstance(found, list | tuple) or not 1 <= len(found) <= TERMS:
        raise ValueError(f"terms returned {found!r:.200}: it must return a list of 1 to {TERMS} numbers")
    numbers = [float(one) for one in found]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"a term is not finite: {numbers}")
    return numbers


def dot(one, other):
    return math.fsum(map(mul, one, other))


def without(column, size, direction):
    """Return a column minus `size` times a direction."""
    return [value - size * unit for value, unit in zip(column, direction, strict=True)]


def fit(rows, targets):
    """Return the weights with the smallest squared error, by modified Gram-Schmidt; 0 for a dependent term."""
    count = len(rows[0])
    if any(len(row) != count for row in rows):
        raise ValueError("terms returned lists of different lengths")
    basis, triangle = [], []
    for column in map(list, zip(*rows, strict=True)):
        size, parts = math.sqrt(dot(column, column)), []
        for direction in basis:
            parts.append(dot(column, direction))
            column = without(column, parts[-1], direction)
        length = math.sqrt(dot(column, column))
        length = 0.0 if length <= 1e-6 * size else length
        basis.append([value / length if length else 0.0 for value in column])
        triangle.append([*parts, length])
    weights, rest = [0.0] * count, targets
    onto = []
    for direction in basis:
        onto.append(dot(rest, direction))
        rest = without(rest, onto[-1], direction)
    for term in reversed(range(count)):
        if triangle[term][term]:
            later = math.fsum(triangle[other][term] * weights[other] for other in range(term + 1, count))
            weights[term] = (onto[term] - later) / triangle[term][term]
    return weights


points = [point for start in STARTS for point in motion(*start)]
rows, targets = [values(point) for point in points], [acceleration(*point) for point in points]
weights = fit(rows[::2], targets[::2])
errors = [target - dot(row, weights) for row, target in zip(rows[1::2], targets[1::2], strict=True)]
mean = math.fsum(targets) / len(targets)
variance = math.fsum((target - mean) ** 2 for target in targets) / len(targets)
error = math.fsum(one * one for one in errors) / len(errors) / variance
print(json.dumps({"score": math.log10(error + SMALLEST), **{f"weight {i}": w for i, w in enumerate(weights)}}))
