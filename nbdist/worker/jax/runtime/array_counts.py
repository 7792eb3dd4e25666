"""Sums of squares and histograms of arrays of JAX, in programs over all devices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from nbdist.worker.runtime import signals


def real(array: Any) -> Any:
    """Return an array in float32, or in complex64."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array.astype(jnp.complex64 if is_complex else jnp.float32)


def square(array: Any) -> Any:
    """Return the sum of the squares of all elements."""
    return jnp.sum(jnp.square(jnp.abs(real(array))))


def counted(array: Any) -> Any:
    """Return the row of a histogram: `MOMENTS`, then the counts."""
    flat = jnp.real(real(array)).reshape(-1)
    is_finite = jnp.isfinite(flat)
    size = jnp.sum(is_finite)
    safe = jnp.where(is_finite, flat, 0)
    low = jnp.min(flat, initial=jnp.inf, where=is_finite)
    high = jnp.max(flat, initial=-jnp.inf, where=is_finite)
    high = jnp.maximum(high, low + jnp.maximum(jnp.abs(low), 1) * 1e-6)
    places = jnp.clip((safe - low) / (high - low) * signals.BINS, 0, signals.BINS - 1)
    counts = jnp.zeros(signals.BINS, jnp.float32).at[places.astype(jnp.int32)].add(is_finite)
    moments = (low, high, jnp.sum(safe), jnp.sum(jnp.square(safe)), size, flat.size - size)
    return jnp.concatenate([jnp.stack([jnp.asarray(m, jnp.float32) for m in moments]), counts])
