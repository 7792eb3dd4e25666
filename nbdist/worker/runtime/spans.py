"""Spans of time; time that several collectives share counts once."""

from __future__ import annotations

import contextlib
import sys

import numpy as np


def annotated(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a span of this thread in traces of JAX; an empty context without JAX."""
    profiler = getattr(sys.modules.get("jax"), "profiler", None)  # JAX may be importing
    if profiler is None:
        return contextlib.nullcontext()
    annotation: contextlib.AbstractContextManager[object] = profiler.TraceAnnotation(name)
    return annotation


def covered(spans: np.ndarray) -> float:
    """Return the time that the spans cover together, in their unit.

    Args:
        spans: begin and end of each span, shape `(n, 2)`.
    """
    if len(spans) < 2:
        return float((spans[:, 1] - spans[:, 0]).sum())
    ordered = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(ordered[:, 1])
    begins = np.maximum(ordered[1:, 0], ends[:-1])
    further = np.maximum(ends[1:] - begins, 0).sum()
    return float(ends[0] - ordered[0, 0] + further)
