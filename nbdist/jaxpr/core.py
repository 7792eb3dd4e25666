"""Parts of JAX's programs that `jax.extend.core` has from JAX 0.10 on, for earlier versions too."""

from __future__ import annotations

try:
    from jax.extend.core import (
        DropVar,
        concrete_or_error,
        jaxprs_in_params,
        new_jaxpr_eqn,
        unmapped_aval,
    )
except ImportError:  # JAX 0.8 and 0.9
    from jax._src.core import (
        DropVar,
        concrete_or_error,
        jaxprs_in_params,
        new_jaxpr_eqn,
        unmapped_aval,
    )

__all__ = ["DropVar", "concrete_or_error", "jaxprs_in_params", "new_jaxpr_eqn", "unmapped_aval"]
