"""Confidence bounds of medians, for measurements of any distribution.

The lower bound is the largest order statistic that exceeds the median of the distribution with a
probability of at most `ALPHA` (the sign test): of 50 independent values, 42 reach it. Values that
follow each other are alike if a load lasts for several steps. The bound is therefore computed for
the number of independent values, n (1 - r) / (1 + r), where r is their correlation with the next
value.

Sources: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.
G. V. Bayley and J. M. Hammersley, The "effective" number of independent observations in an
autocorrelated time series, 1946.
"""

from __future__ import annotations

import math
from statistics import StatisticsError, correlation
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ALPHA = 1e-6
"""Largest probability that the bound exceeds the median by chance."""

_ROUNDING = 1e-9
"""Relative difference of equal times, in which a correlation would be that of rounding errors."""


def lower_bound(values: Sequence[float]) -> float:
    """Return the lower confidence bound of the median. Minus infinity for too few values."""
    number = _independent(values)
    place = _place_of_bound(number)
    if place == 0:
        return -math.inf
    return sorted(values)[place * len(values) // number - 1]


def _independent(values: Sequence[float]) -> int:
    """Return the number of independent values that contain as much information."""
    if len(values) < 3 or max(values) - min(values) <= _ROUNDING * abs(max(values)):
        return len(values)
    try:
        r = max(0.0, correlation(values[:-1], values[1:]))
    except StatisticsError:  # only the first or the last value differs
        return len(values)
    return int(len(values) * (1 - r) / (1 + r))


def _place_of_bound(number: int) -> int:
    """Return the place of the bound in `number` sorted values, from 1; 0 for too few values."""
    below, place = 0, 0
    while (below := below + math.comb(number, place)) <= ALPHA * 2**number:
        place += 1
    return place
