"""Check of a plan by the compiler of its hardware, which need not be present."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.extend
import msgspec

from nbdist.errors import PlanError
from nbdist.planner.hardware.compiler_targets import compiler_target, is_compiler_installed
from nbdist.planner.search.explain import gib
from nbdist.planner.search.search import plans
from nbdist.records import STAGE, RunnerUp
from nbdist.worker.planning.compile_job import REFUSED, Job, Outcome, partition
from nbdist.worker.planning.rewrite import rewritten
from nbdist.worker.planning.sharding import mesh_layout_of, places_of, put_together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.model import Role
    from nbdist.planner.hardware.compiler_targets import CompilerTarget
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Plan, Spec
    from nbdist.worker.planning.query import PlanQuery

MOST = 3
"""Maximum number of plans that are compiled."""

_COMPILE_S = 600.0
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server describes a slice
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
}


def verified_plan(query: PlanQuery, steps: Steps) -> Plan:
    """Return the fastest layout whose compiled program fits in memory.

    Compiles the best plans in parallel.

    Args:
        query: The step and the conditions of its plan.
        steps: The same step, as the planner sees it.

    Raises:
        PlanError: None of the best plans fits, or the compiler is missing or fails.
    """
    target = query.target
    compiler = compiler_target(target.topology)
    _check_there(compiler, target)
    best = plans(steps, target, query.request, query.pinned, most=MOST)
    with ThreadPoolExecutor(os.cpu_count(), "nbdist-compile") as pool:
        jobs = (_job(query.traced, query.inputs, found, compiler) for found in best)
        outcomes = list(pool.map(_compile, jobs))
    for place, (found, outcome) in enumerate(zip(best, outcomes, strict=True)):
        if outcome.verified is not None and outcome.verified.total <= found.memory.available:
            before = [_refused(*pair) for pair in zip(best[:place], outcomes, strict=False)]
            sizes = {
                one.title: other.verified.total
                for one, other in zip(best, outcomes, strict=True)
                if other.verified is not None
            }
            after = (
                msgspec.structs.replace(one, compiled_bytes=sizes.get(one.title, 0))
                for one in found.runners_up
            )
            runners_up = (*before, *after)
            return msgspec.structs.replace(found, verified=outcome.verified, runners_up=runners_up)
    refused = (_refused(*pair) for pair in zip(best, outcomes, strict=True))
    reasons = "; ".join(f"{one.title}: {one.why}" for one in refused)
    raise PlanError(f"none of the best plans fits in memory: {reasons}")


def _refused(found: Plan, outcome: Outcome) -> RunnerUp:
    """Describe a plan that needs too much memory.

    Raises:
        PlanError: The compilation failed for another reason.
    """
    total = 0
    if outcome.verified is not None:
        total = outcome.verified.total
        why = f"compiled, it needs {gib(total)}, but {gib(found.memory.available)} are available"
    elif REFUSED in outcome.error:
        why = f"the compiler rejects it: {outcome.error.partition(REFUSED)[2].strip(': ')}"
    else:
        raise PlanError(f"the plan {found.title} cannot be compiled: {outcome.error}")
    return RunnerUp(
        title=found.title,
        step_s=found.time.step,
        device_bytes=found.memory.total,
        why=why.splitlines()[0],
        compiled_bytes=total,
    )


def _check_there(compiler: CompilerTarget, target: Target) -> None:
    if not is_compiler_installed(compiler.platform):
        raise PlanError(
            f"--verify: the compiler for {target.topology.chip.name} is not installed on the "
            "workers: run pip install 'nbdist[oracle]'"
        )


def _job(
    traced: Any, inputs: Sequence[tuple[str, Role]], found: Plan, compiler: CompilerTarget
) -> Job:
    """Lower the step for an abstract mesh, and describe its compilation."""
    mesh = jax.sharding.AbstractMesh(
        tuple(found.axes.values()),
        tuple(found.axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(found.axes),
    )
    kinds = [variable.aval for variable in traced.jaxpr.invars]
    specs = _input_specs(inputs, kinds, found)
    carried = sum(role == "carried" for _, role in inputs)
    reported = len(traced.jaxpr.outvars) - carried
    outputs: list[Spec] = [()] * reported + specs[:carried]
    arguments = [
        jax.ShapeDtypeStruct(
            kind.shape, kind.dtype, sharding=jax.NamedSharding(mesh, partition(spec))
        )
        for kind, spec in zip(kinds, specs, strict=True)
    ]

    def exported() -> bytes:
        with jax.sharding.use_abstract_mesh(mesh):
            stages = found.axes.get(STAGE, 1)
            own = mesh_layout_of(found, mesh, specs)
            places = places_of(found, mesh)
            closed = rewritten(
                traced, inputs, found.remat, found.micro, stages, own, found.staging, places
            )
            step = jax.jit(
                _with_rows(closed, [role for _, role in inputs], found.axes),
                out_shardings=[jax.NamedSharding(mesh, partition(spec)) for spec in outputs],
            )
            made = jax.export.export(step, platforms=[compiler.platform])(*arguments)
        return bytes(made.serialize())

    with ThreadPoolExecutor(1, "nbdist-export") as thread:  # this thread has a live mesh
        program = thread.submit(exported).result()
    return Job(
        target=compiler,
        program=program,
        axes=found.axes,
        inputs=tuple(specs),
        outputs=tuple(outputs),
        carried=carried,
    )


def _input_specs(
    inputs: Sequence[tuple[str, Role]], kinds: Sequence[Any], found: Plan
) -> list[Spec]:
    """Return the spec of each input of the step."""
    planned = {tensor.path: tensor.spec for tensor in found.tensors}
    return [
        _rows(kind.shape, found) if role == "batch" else planned.get(path, ())
        for (path, role), kind in zip(inputs, kinds, strict=True)
    ]


def _rows(shape: tuple[int, ...], found: Plan) -> Spec:
    """Return the spec of a batch on arrival: split over all devices, as on the workers."""
    if not shape or shape[0] % found.devices:
        return ()
    return (tuple(found.axes), *((),) * (len(shape) - 1))


def _with_rows(traced: Any, roles: Sequence[Role], sizes: Mapping[str, int]) -> Any:
    """Return the step as a function of its arrays; it gathers each batch along the model axis."""
    step = jax.extend.core.jaxpr_as_fun(traced)

    def sharded(array: jax.Array, role: Role) -> jax.Array:
        return put_together(array, sizes) if role == "batch" else array

    return lambda *arrays: step(*map(sharded, arrays, roles))


def _compile(job: Job) -> Outcome:
    """Compile a job in a separate process."""
    with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
        answer = Path(folder) / "outcome"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "nbdist.worker.planning.compile_job", str(answer)],
                input=msgspec.msgpack.encode(job),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | _ENVIRONMENT,
                timeout=_COMPILE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(error=f"the compiler did not finish within {_COMPILE_S:g} s")
        if answer.exists():
            return msgspec.msgpack.decode(answer.read_bytes(), type=Outcome)
    last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    return Outcome(error=f"the compiler exited with code {done.returncode}: {last_line[0]}")
