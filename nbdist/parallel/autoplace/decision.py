"""One decision of `@autoplace`: known from the file, or made by trials."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.parallel.autoplace.candidates import AS_CALLED, offer, scene_of
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
    """A call that is to be decided.

    Attributes:
        function: its name.
        jitted: what is called.
        traced: its program, `jax.stages.Traced`.
        given: its inputs.
        is_fixed: whether the program says itself where it runs.
    """

    function: str
    jitted: Callable[..., Any]
    traced: Any
    given: Given
    is_fixed: bool


@dataclass(frozen=True)
class Decided:
    """What was decided, and the candidate of that name."""

    decision: Decision
    candidate: Candidate


def decide(call: Call, kept: Choices) -> Decided:
    """Where it runs. Nothing is run where the function has effects, or there is one place.

    Between processes that share the inputs, all decide the same: each has to call it.
    """
    leaves = call.given.leaves
    if why := _no_choice(call):
        return Decided(_default(call, why), AS_CALLED)
    scene = scene_of(leaves)
    outs = jax.tree_util.tree_leaves(call.traced.out_info)
    out_bytes = sum(int(np.prod(out.shape, dtype=np.int64)) * out.dtype.itemsize for out in outs)
    offered = offer(scene, leaves, call.given.arguments, out_bytes)
    if len(offered.candidates) == 1:
        return Decided(_default(call, "there is no other place", offered), AS_CALLED)
    print_of = fingerprint(call.traced.jaxpr, call.given.tree, leaves, scene.mesh)
    most = _greatest if scene.is_shared else alone
    known = _known(kept.get(print_of), offered, most)
    if known is None:
        known = _tried(call, print_of, offered, most)
        kept.put(known)
    return Decided(known, offered.called(known.chosen))


def _no_choice(call: Call) -> str:
    """Why there is none; empty where there is."""
    if effects := sorted({type(effect).__name__ for effect in call.traced.jaxpr.effects}):
        return f"it has effects ({', '.join(effects)}), which trials would repeat"
    if call.is_fixed:
        return "it was jitted with shardings or a device of its own"
    return ""


def _greatest(figures: np.ndarray) -> np.ndarray:
    """Of all processes; each has to call it."""
    most: np.ndarray = processes.gather(np.asarray(figures, np.float32)).max(axis=0)
    return most


def _known(kept: Decision | None, offered: Offer, most: Most) -> Decision | None:
    """What was kept, where each process has the same, and it can still be chosen."""
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
    """The default, without a trial."""
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
    """A call with its inputs moved to where a candidate has them.

    Args:
        call: what is called.
        candidate: where.
        donated: of each input, whether the call uses it up: it is given copies.
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
