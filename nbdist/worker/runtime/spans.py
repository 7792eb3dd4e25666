"""Spans of time: of several collectives under way at once, a second counts once."""

from __future__ import annotations

import numpy as np


def covered(spans: np.ndarray) -> float:
    """The time that spans cover together, in their unit.

    Args:
        spans: begin and end of each: shape (n, 2).
    """
    if len(spans) < 2:
        return float((spans[:, 1] - spans[:, 0]).sum())
    ordered = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(ordered[:, 1])
    begins = np.maximum(ordered[1:, 0], ends[:-1])
    further = np.maximum(ends[1:] - begins, 0).sum()
    return float(ends[0] - ordered[0, 0] + further)
