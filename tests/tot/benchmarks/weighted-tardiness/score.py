"""Weighted tardiness of 40 jobs on one machine, against an order by due time."""

import random

from candidate import priority
from instances import SEEDS


def lateness(jobs, rule):
    waiting, now, total = list(jobs), 0, 0
    while waiting:
        job = max(waiting, key=lambda one: rule(*one, now))
        waiting.remove(job)
        duration, due, weight = job
        now += duration
        total += weight * max(0, now - due)
    return total


def share(seed):
    rng = random.Random(f"jobs {seed}")
    durations = [rng.randint(1, 99) for _ in range(40)]
    load = sum(durations)
    jobs = [(duration, rng.randint(load // 5, 4 * load // 5), rng.randint(1, 10)) for duration in durations]
    by_due_time = lateness(jobs, lambda duration, due, weight, now: -due)
    return by_due_time / (by_due_time + lateness(jobs, priority))


print(sum(map(share, SEEDS)) / len(SEEDS))
