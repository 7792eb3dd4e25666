"""Confidence that a median exceeds a limit, for measurements of any distribution.

The sign test counts the values above the limit. If the median is at most the limit, so many of them
exceed it with a probability of at most `ALPHA`: 42 of 50 independent values are enough. A load that
lasts for several steps raises all of them. The test therefore counts as many independent values as
contain the same information, n (1 - r) / (1 + r), where r is the correlation of "is above the
limit" with the next value.

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
"""Largest probability that a median at the limit passes the test by chance."""


def exceeds(values: Sequence[float], limit: float) -> bool:
    """Return True if the median of the values' distribution exceeds a limit with confidence."""
    above = [value > limit for value in values]
    number = _independent(above)
    if number == 0:
        return False
    return _chance(number, int(sum(above) * number / len(above))) <= ALPHA


def _independent(above: Sequence[bool]) -> int:
    """Return the number of independent values that contain as much information."""
    try:
        r = max(0.0, correlation(above[:-1], above[1:]))
    except StatisticsError:  # too few values, or only the first or the last one differs
        return len(above)
    return int(len(above) * (1 - r) / (1 + r))


def _chance(number: int, above: int) -> float:
    """Return the probability that so many of `number` values exceed their median, or more."""
    ways = sum(math.comb(number, count) for count in range(above, number + 1))
    return float(ways / 2**number)
