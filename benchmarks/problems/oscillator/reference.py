"""polynomial of degree 2"""


def terms(t, x, v):
    return [1, t, x, v, t * x, t * v, x * v, t * t, x * x, v * v]
