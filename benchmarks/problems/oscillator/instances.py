"""The positions and velocities at the beginning of the measured motions."""

STARTS = [(0.5, 0.5), (-1.0, 0.8), (1.5, -0.5)]
