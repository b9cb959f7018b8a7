"""Intervals of proportions. Does not load torch."""

import math

NORMAL_95 = 1.959964  # standard normal quantile of a 95 % interval


def wilson_interval(rate: float, n: float, z: float = NORMAL_95) -> tuple[float, float]:
    """Wilson score interval of a proportion `rate` observed in n cases, also valid near 0 and 1; (0, 1) if n is 0."""
    if n <= 0:
        return 0.0, 1.0
    center = rate + z * z / (2 * n)
    half_width = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (center - half_width) / scale), min(1.0, (center + half_width) / scale)
