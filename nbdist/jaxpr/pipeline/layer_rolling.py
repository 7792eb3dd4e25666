"""Equal layers that a step applies one by one, rewritten as scans over stacked parameters.

The parameters remain separate inputs of the step, which stacks them. `layer_chains` finds the
layers. Here, each pass over them becomes a scan, if all layers read the same values, or own ones
of the same kind: results of the layer before, parameters, results of the forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from nbdist.jaxpr.core import unmapped_aval
from nbdist.jaxpr.flatten import flat, renamed, variables
from nbdist.jaxpr.pipeline.layer_chains import Place, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.pipeline.layer_chains import Chain
    from nbdist.planner.graph.model import Role


def with_layer_scans(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> ClosedJaxpr | None:
    """Return the same step with equal layers, applied one by one, as a scan in each pass.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.

    Returns:
        The step; None if it has no equal layers, or side effects, whose order would change.
    """
    program = flat(closed)
    if any(eqn.effects for eqn in program.jaxpr.eqns):
        return None
    step = Step(program.jaxpr, [role == "batch" for _, role in inputs])
    for forward, backward in step.passes():
        try:
            return ClosedJaxpr(_Rolled(step, forward, backward).jaxpr(), program.consts)
        except _UnequalError:
            continue
    return None


class _UnequalError(Exception):
    """Segments that are not the layers of a model."""


class _Pass:
    """The segments of a pass, as the body of a scan.

    Attributes:
        carried: first value, and variable of the body, of each result that the next segment reads.
        shared: variable of the body of each value that all segments read.
        own: variable of the body of inputs that segments have of their own, by layer.
        stacked: values of the body that leave it as stacks, with the variable of the stack.

    Args:
        step: the step.
        chain: its segments.
        forward: the forward pass, if this is the backward pass.
    """

    def __init__(self, step: Step, chain: Chain, forward: _Pass | None) -> None:
        self._step, self.chain, self._forward = step, chain, forward
        self.is_reverse = forward is not None
        self.carried: dict[Place, tuple[Var, Var]] = {}
        self.shared: dict[Var, Var] = {}
        self.own: dict[tuple[Var, ...], Var] = {}
        self.stacked: dict[Var, Var] = {}
        self._segments = [step.segment(chain, number) for number in range(chain.segments)]
        self._eqns = [
            eqn.replace(invars=[self._inside(n, slot) for slot in range(len(eqn.invars))])
            for n, eqn in enumerate(self._segments[1])
        ]
        if not self.carried:
            raise _UnequalError

    def _inside(self, eqn: int, slot: int) -> Any:
        """Return an input of an equation of the body."""
        atoms = [segment[eqn].invars[slot] for segment in self._segments]
        atom = atoms[1]
        if isinstance(atom, Literal):
            return atom
        found = self._step.place(atom, self.chain)
        if found is None:
            return self._outer(atoms)
        number, place = found
        before = 1 - number
        if before not in (0, 1):
            raise _UnequalError
        makers = (segment[place.eqn].outvars[place.out] for segment in self._segments)
        if any(one is not made for one, made in zip(atoms[before:], makers, strict=False)):
            raise _UnequalError
        return self._carry(place, atoms[0], atom) if before else atom

    def _carry(self, place: Place, first: Any, atom: Var) -> Var:
        before, inside = self.carried.setdefault(place, (first, Var(first.aval)))
        if before is not first or isinstance(first, Literal) or not self._is_known(first):
            raise _UnequalError
        if first.aval != atom.aval:
            raise _UnequalError
        return inside

    def _outer(self, atoms: list[Var]) -> Var:
        """Return the variable of the body for values from outside of the pass."""
        if all(atom is atoms[0] for atom in atoms):
            if not self._is_known(atoms[0]):
                raise _UnequalError
            return self.shared.setdefault(atoms[0], Var(atoms[0].aval))
        by_layer = tuple(atoms[::-1] if self.is_reverse else atoms)
        if by_layer not in self.own:
            is_result = self._forward is not None and self._forward.stack_of(by_layer) is not None
            if not is_result and any(self._step.maker(atom) >= 0 for atom in by_layer):
                raise _UnequalError
            self.own[by_layer] = Var(by_layer[0].aval)
        return self.own[by_layer]

    def _is_known(self, var: Var) -> bool:
        """Return True if a value exists when the pass starts."""
        return self._step.maker(var) < self.chain.start

    def stack_of(self, by_layer: tuple[Var, ...]) -> Var | None:
        """Return the stack of results, or of inputs, of all segments; None if they are neither."""
        last = self._step.place(by_layer[-1], self.chain)
        if last is None:
            return None
        number, place = last
        before = self.chain.segments - 1 - number
        wanted = [(n, place) for n in range(self.chain.segments - before)]
        if [self._step.place(var, self.chain) for var in by_layer[before:]] != wanted:
            return None
        if before == 0:
            return self.stack(self.result(place))
        if before > 1 or self.carried.get(place, (None,))[0] is not by_layer[0]:
            return None
        return self.stack(self.carried[place][1])

    def result(self, place: Place) -> Var:
        """Return a result of the body."""
        found: Var = self._eqns[place.eqn].outvars[place.out]
        return found

    def stack(self, inside: Var) -> Var:
        """Return the stack of a value of the body, which leaves the scan."""
        aval = unmapped_aval(self.chain.segments, 0, inside.aval)
        return self.stacked.setdefault(inside, Var(aval))

    def scan(self, stacks: dict[tuple[Var, ...], Var], lasts: dict[Place, Var]) -> Any:
        """Return the equation of the scan.

        Args:
            stacks: the stack of each own input.
            lasts: variables of carried results.
        """
        shared, own = list(self.shared.values()), list(self.own.values())
        carried = [inside for _, inside in self.carried.values()]
        body = self._step.whole.replace(
            constvars=[],
            invars=[*shared, *carried, *own],
            outvars=[*map(self.result, self.carried), *self.stacked],
            eqns=self._eqns,
        )
        run = jaxpr_as_fun(ClosedJaxpr(body, []))

        def scan(shared: Any, carried: Any, own: Any) -> Any:
            def layer(now: Any, given: Any) -> Any:
                outs = run(*shared, *now, *given)
                return outs[: len(carried)], outs[len(carried) :]

            return jax.lax.scan(layer, carried, own, self.chain.segments, reverse=self.is_reverse)

        outer = [
            list(self.shared),
            [first for first, _ in self.carried.values()],
            [stacks[by_layer] for by_layer in self.own],
        ]
        made = jax.make_jaxpr(scan)(*([_outline(var) for var in part] for part in outer))
        (eqn,) = made.eqns
        outs = [*(lasts[place] for place in self.carried), *self.stacked.values()]
        names = dict(zip(made.jaxpr.invars, (var for part in outer for var in part), strict=True))
        return eqn.replace(
            invars=renamed(eqn.invars, names), outvars=outs, source_info=self._eqns[0].source_info
        )


def _outline(var: Var) -> Any:
    aval: Any = var.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


class _Rolled:
    """A step with both passes over its layers as scans."""

    def __init__(self, step: Step, forward: Chain, backward: Chain) -> None:
        self._step = step
        first = _Pass(step, forward, None)
        self._passes = first, _Pass(step, backward, first)
        self._names: dict[Var, Var] = {}
        self._stacks: dict[tuple[Var, ...], Var] = {}
        self._slices: dict[Var, list[Any]] = {}  # equations of layers that are not read yet
        self._eqns: list[Any] = []

    def jaxpr(self) -> Jaxpr:
        """Return the program."""
        whole, own = self._step.whole, iter(self._step.eqns)
        needed = self._needed()
        lasts = {one.chain.end - 1: one for one in self._passes}
        now, place = next(own, None), 0
        for eqn in whole.eqns:
            if eqn is not now:
                self._add(eqn)
                continue
            if not any(one.chain.start <= place < one.chain.end for one in self._passes):
                self._add(eqn)
            elif place in lasts:
                self._add_pass(lasts[place], needed)
            now, place = next(own, None), place + 1
        self._add_slices(whole.outvars)
        outs = renamed(whole.outvars, self._names)
        return whole.replace(eqns=self._eqns, outvars=outs)

    def _add(self, eqn: Any) -> None:
        self._add_slices(eqn.invars)
        self._eqns.append(eqn.replace(invars=renamed(eqn.invars, self._names)))

    def _add_slices(self, atoms: Sequence[Any]) -> None:
        """Add the equations that take layers from stacks right before their first use."""
        for var in variables(atoms):
            self._eqns += self._slices.pop(var, ())

    def _needed(self) -> set[Var]:
        """Return the variables that are read outside of both passes, or when one starts."""
        found = set(variables(self._step.whole.outvars))
        for place, eqn in enumerate(self._step.eqns):
            if not any(one.chain.start <= place < one.chain.end for one in self._passes):
                found.update(variables(eqn.invars))
        for one in self._passes:
            found.update(one.shared, (first for first, _ in one.carried.values()))
        return found

    def _add_pass(self, one: _Pass, needed: set[Var]) -> None:
        """Add the scan of a pass, its stacked inputs, and the slices of its results."""
        first = self._passes[0]
        for by_layer in one.own:
            if by_layer not in self._stacks:
                stack = None if one is first else first.stack_of(by_layer)
                self._stacks[by_layer] = self._stacked(by_layer) if stack is None else stack
        count = one.chain.segments
        lasts = {place: Var(one.result(place).aval) for place in one.carried}
        leaving: dict[Place, dict[int, Var]] = defaultdict(dict)
        for number in range(count):
            for eqn, made in enumerate(self._step.segment(one.chain, number)):
                for out, var in enumerate(made.outvars):
                    place = Place(eqn, out)
                    if var not in needed:
                        continue
                    if number == count - 1 and place in lasts:
                        self._names[var] = lasts[place]
                    else:
                        leaving[place][count - 1 - number if one.is_reverse else number] = var
        for place in leaving:
            one.stack(one.result(place))
        eqn = one.scan(self._stacks, lasts)
        self._add(eqn)
        for place, by_number in leaving.items():
            self._take(one.stack(one.result(place)), by_number)

    def _stacked(self, by_layer: tuple[Var, ...]) -> Var:
        """Add the equations that stack values, and return the stack."""

        def stack(*given: Any) -> Any:
            return jax.lax.concatenate([jax.lax.expand_dims(one, (0,)) for one in given], 0)

        made = jax.make_jaxpr(stack)(*map(_outline, by_layer))
        names = dict(zip(made.jaxpr.invars, by_layer, strict=True))
        for eqn in made.eqns:
            self._add(eqn.replace(invars=renamed(eqn.invars, names)))
        (out,) = made.jaxpr.outvars
        assert isinstance(out, Var)
        return out

    def _take(self, stack: Var, by_number: dict[int, Var]) -> None:
        """Note the equations that take layers from a stack.

        Args:
            stack: the stack.
            by_number: the variable of each layer.
        """
        made = jax.make_jaxpr(lambda given: jax.lax.index_in_dim(given, 0, keepdims=False))(
            _outline(stack)
        )
        first, *rest = made.eqns
        aval: Any = stack.aval
        for number, var in by_number.items():
            names = {v: Var(v.aval) for eqn in made.eqns for v in eqn.outvars}
            starts = number, *[0] * (aval.ndim - 1)
            limits = number + 1, *aval.shape[1:]
            params = first.params | {"start_indices": starts, "limit_indices": limits}
            own = [first.replace(invars=[stack], params=params), *rest]
            (out,) = made.jaxpr.outvars
            assert isinstance(out, Var)
            self._names[var] = names[out]
            self._slices[var] = [
                eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names))
                for eqn in own
            ]
