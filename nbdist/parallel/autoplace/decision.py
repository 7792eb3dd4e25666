"""A decision of `@autoplace`: read from the file, or made by trials."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.parallel.autoplace.candidates import AS_CALLED, constraints_of, offer
from nbdist.parallel.autoplace.fingerprint import described, fingerprint
from nbdist.parallel.autoplace.trials import Contender, alone, tried
from nbdist.records.autoplace import DEFAULT, Decision
from nbdist.worker.jax.runtime import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.parallel.autoplace.cache import Choices
    from nbdist.parallel.autoplace.candidates import Candidate, Offer
    from nbdist.parallel.autoplace.signatures import Given
    from nbdist.parallel.autoplace.trials import Most


@dataclass(frozen=True)
class Call:
    """A call to decide on.

    Attributes:
        function: name of the function.
        jitted: the jitted function.
        traced: its program, `jax.stages.Traced`.
        given: its inputs.
        is_fixed: True if the program itself sets shardings or a device.
    """

    function: str
    jitted: Callable[..., Any]
    traced: Any
    given: Given
    is_fixed: bool


@dataclass(frozen=True)
class Decided:
    """A decision, and its candidate."""

    decision: Decision
    candidate: Candidate


def decide(call: Call, kept: Choices) -> Decided:
    """Decide where a call runs. Functions with effects, or with one place, are not tried.

    Processes that share the inputs must all call this, and decide the same.
    """
    leaves = call.given.leaves
    if why := _no_choice(call):
        return Decided(_default(call, why), AS_CALLED)
    constraints = constraints_of(leaves)
    outs = jax.tree_util.tree_leaves(call.traced.out_info)
    out_bytes = sum(int(np.prod(out.shape, dtype=np.int64)) * out.dtype.itemsize for out in outs)
    offered = offer(constraints, leaves, call.given.arguments, out_bytes)
    if len(offered.candidates) == 1:
        return Decided(_default(call, "there is no other place", offered), AS_CALLED)
    print_of = fingerprint(call.traced.jaxpr, call.given.tree, leaves, constraints.mesh)
    most = _greatest if constraints.is_shared else alone
    known = _known(kept.get(print_of), offered, most)
    if known is None:
        known = _tried(call, print_of, offered, most)
        kept.put(known)
    return Decided(known, offered.called(known.chosen))


def _no_choice(call: Call) -> str:
    """Return why there is no choice; empty if there is one."""
    if effects := sorted({type(effect).__name__ for effect in call.traced.jaxpr.effects}):
        return f"it has effects ({', '.join(effects)}), which trials would repeat"
    if call.is_fixed:
        return "it was jitted with shardings or a device of its own"
    return ""


def _greatest(figures: np.ndarray) -> np.ndarray:
    """Return the maximum over all processes, each of which must call this."""
    most: np.ndarray = processes.gather(np.asarray(figures, np.float32)).max(axis=0)
    return most


def _known(kept: Decision | None, offered: Offer, most: Most) -> Decision | None:
    """Return the stored decision, if all processes have the same, and it is a candidate."""
    names = [candidate.name for candidate in offered.candidates]
    number = names.index(kept.chosen) if kept is not None and kept.chosen in names else -1
    greatest, negated = most(np.array([number, -number], np.float32))
    return kept if greatest == -negated and number >= 0 else None


def _tried(call: Call, print_of: str, offered: Offer, most: Most) -> Decision:
    donated = [info.donated for info in jax.tree_util.tree_leaves(call.traced.args_info)]
    ways = [_Way(call, candidate, donated) for candidate in offered.candidates]
    verdict = tried(ways, most)
    return Decision(
        function=call.function,
        fingerprint=print_of,
        inputs=described(call.given.leaves),
        chosen=verdict.choice.name,
        why=verdict.choice.why,
        timed=verdict.timed,
        left_out=(*offered.left_out, *verdict.left_out),
        made=time.time(),
    )


def _default(call: Call, why: str, offered: Offer | None = None) -> Decision:
    """Return the default without a trial."""
    return Decision(
        function=call.function,
        fingerprint="",
        inputs=described(call.given.leaves),
        chosen=DEFAULT,
        why=why,
        left_out=offered.left_out if offered is not None else (),
        made=time.time(),
    )


class _Way(Contender):
    """A call with its inputs moved to a candidate's place.

    Args:
        call: the call.
        candidate: the place.
        donated: for each input, True if the call donates it and gets a copy.
    """

    def __init__(self, call: Call, candidate: Candidate, donated: Sequence[bool]) -> None:
        self.name = candidate.name
        self.words = candidate.words
        self._call = call
        self._candidate = candidate
        self._donated = donated

    def prepare(self) -> list[Any]:
        copies = [
            leaf.copy() if used and isinstance(leaf, jax.Array) else leaf
            for leaf, used in zip(self._call.given.leaves, self._donated, strict=True)
        ]
        return jax.block_until_ready(copies)  # type: ignore[no-any-return]

    def call(self, prepared: list[Any]) -> Any:
        positions, named = self._call.given.with_leaves(self._candidate.moved(prepared))
        return self._call.jitted(*positions, **named)
