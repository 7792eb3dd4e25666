"""Patch of `jax.default_device` and `jax_default_device` on several processes.

Tutorials choose `jax.devices()[0]`, which is the first device of rank 0. On another rank, arrays
then have no values, and JAX raises "Cannot reshard an input that is not fully addressable" for them
(JAX 0.10.2). This module takes the own device at the same place, as each rank would with
`jax.local_devices()`.

JAX parses the value of the context manager and of the global option in one function, which this
module replaces. JAX 0.8 and 0.9 have no such function. `tests/end_to_end/test_own_mesh.py` fails
when the patch is no longer needed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from nbdist.private_api.jax import default_device
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Callable

_USE = "each rank uses its own default device"


@functools.cache
def apply() -> None:
    """Patch the parser of the default device, if this version of JAX has one."""
    upstream = getattr(default_device, "_parser", None)
    if upstream is not None:
        default_device._parser = _parser(upstream)


def _parser(upstream: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(upstream)
    def parser(value: Any) -> Any:
        own = own_device(value, _USE) if isinstance(value, jax.Device) else value
        return upstream(own)

    return parser


def own_device(device: jax.Device, use: str) -> jax.Device:
    """Return the device of this process at the same place as a device of another process.

    Args:
        device: a device of any process.
        use: beginning of the message about a device of another process.
    """
    if device.process_index == jax.process_index():
        return device
    owner = device.process_index
    place = jax.local_devices(owner, device.platform).index(device)
    own = jax.local_devices(backend=device.platform)
    text = f"{use}: {device} is a device of rank {owner}"
    context.current().reporter.note_once("strategy", text)
    return own[place % len(own)]
