def priority(duration, due, weight, now):
    """Return a job's priority: the job with the highest one runs next."""
    return -due
