"""What the benches in Python share. It needs no package, so that peers can run it in environments of their own."""

from __future__ import annotations

import random
import statistics


def arrival_times(rate: float, seconds: float, chance: random.Random) -> list[float]:
    """A Poisson process from 0 on: the last arrival is the first one after `seconds`."""
    starts = [0.0]
    while starts[-1] < seconds:
        starts.append(starts[-1] + chance.expovariate(rate))
    return starts


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
