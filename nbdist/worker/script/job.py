"""Runtime of exported programs: `nbdist.script` makes this process a rank of its program."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import linecache
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nbdist.cells.parse import parse_cell
from nbdist.cells.step_function import cell_of
from nbdist.errors import UsageError
from nbdist.private_api import jax as private_jax
from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.records import SocketAddress, WorkerIdentity
from nbdist.utils import host_topology
from nbdist.utils.processes import CONTINUES, TERMINATED
from nbdist.worker import cell_scope
from nbdist.worker.checkpoint.folder import steps_in
from nbdist.worker.keras import backend as keras_backend
from nbdist.worker.runtime import context, import_hooks, seeding
from nbdist.worker.runtime.shell import store_source, use_program
from nbdist.worker.runtime.stop_point import StopPoint
from nbdist.worker.script import placement as places
from nbdist.worker.script import rendezvous
from nbdist.worker.script.coordination import Coordinator
from nbdist.worker.script.layouts import options_for
from nbdist.worker.script.loops import ProgramLoops
from nbdist.worker.script.output import shorten_errors
from nbdist.worker.script.peers import Peers
from nbdist.worker.script.preemption import Preemption
from nbdist.worker.script.progress import Progress
from nbdist.worker.script.rank_checks import RankChecks
from nbdist.worker.script.run_store import RunStore, StoreProcess
from nbdist.worker.training import loop as training_loop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from nbdist.records import CellRequest, Communication, Saving, StrategyName
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.script.placement import Placement
    from nbdist.worker.script.rendezvous import Connection

_Definition = TypeVar("_Definition", bound=Callable[..., Any])
_KEY_BYTES = 32


def script(
    strategy: StrategyName,
    *,
    seed: int = 0,
    devices_per_host: int = 0,
    communication: Communication = "auto",
) -> Job:
    """Make this process a rank of the program, and connect it to the other ranks.

    The rank, the number of processes and the address of rank 0 come from the environment:
    `TF_CONFIG`, or the variables of `nbdist run`, Slurm, Open MPI or an indexed Kubernetes job.
    Without them, the program runs in one process. Call it once, at the top of the program.

    Args:
        strategy: `mirrored` (TensorFlow) or `pjrt` (JAX).
        seed: Seed of the generators of Python, NumPy, TensorFlow and Keras, the same on all ranks.
        devices_per_host: Virtual CPU devices of each process under JAX. Default: one.
        communication: Collectives of TensorFlow: `ring`, `nccl`, or `auto`.

    Returns:
        The rank, its strategy, and the functions that train.

    Raises:
        UsageError: No strategy has the name.
        StrategyError: The framework has an untested version.
        StartError: Variables of the launcher are missing or wrong, or a rank did not start.
    """
    if strategy not in ("mirrored", "pjrt"):
        raise UsageError(f"unknown strategy {strategy!r}: choose from mirrored, pjrt")
    placement = places.find(os.environ)
    shorten_errors(placement.rank)
    address = rendezvous.own_address(placement)
    host_topology.choose_interface(address)
    storing = None if placement.rank else StoreProcess(address)
    progress = Progress(placement.rank, placement.world_size)
    key = SocketAddress(url="", server_key=_key(placement))
    identity = WorkerIdentity(
        rank=placement.rank, world_size=placement.world_size, stream=key, dispatch=key, seed=seed
    )
    namespace = vars(sys.modules["__main__"])
    use_program(namespace)
    worker = context.become(identity, progress)
    seeding.seed_generators(seeding.ClusterSeed(seed))
    import_hooks.once_imported("tensorflow", _keep_seeds_of_operations)
    keras_backend.decide_at_import()
    if strategy == "mirrored":
        connection = _build_mirrored(placement, communication)
    else:
        connection = _build_pjrt(placement, devices_per_host)
    import_hooks.once_imported("keras", _report_fits)
    preemption = Preemption(placement, worker, connection.gather)
    progress.on_stopping = preemption.stopping
    store = RunStore(worker, connection, progress, storing)
    checks = RankChecks(worker, connection)
    if program := namespace.get("__file__"):
        checks.compare_files(Path(program))
    peers = Peers(placement, connection.gather, store.fail, lambda: preemption.is_requested)
    return Job(
        worker,
        strategy,
        namespace,
        progress,
        preemption,
        store,
        checks,
        peers,
        connection.close,
    )


class Job:
    """A rank of an exported program.

    Args:
        worker: the rank.
        name: name of its strategy.
        namespace: names of the program.
        progress: takes the reports of the rank.
        preemption: agrees with the other ranks on the last step after SIGTERM.
        store: sends the records of the rank to the process that stores its runs.
        checks: compares the rank with the others.
        peers: ends the program if another rank ends early.
        close: waits for the other ranks, and disconnects this one.

    Attributes:
        strategy: Strategy of all ranks.
    """

    def __init__(
        self,
        worker: Worker,
        name: StrategyName,
        namespace: dict[str, Any],
        progress: Progress,
        preemption: Preemption,
        store: RunStore,
        checks: RankChecks,
        peers: Peers,
        close: Callable[[], None],
    ) -> None:
        self.strategy: Any = worker.strategies[name]
        self._worker = worker
        self._name: StrategyName = name
        self._namespace = namespace
        self._progress = progress
        self._preemption = preemption
        self._store = store
        self._checks = checks
        self._peers = peers
        self._close = close
        self._cells = 0
        self._remark = ""  # about the layout of the next cell
        self._loops = ProgramLoops(namespace, name)
        cell_scope.use_loops(worker)

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._worker.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._worker.world_size

    @property
    def mesh(self) -> Any:
        """Mesh of JAX over all devices of all ranks."""
        return self.strategy.mesh

    def report(self, **values: Any) -> None:
        """Write values as a line, on rank 0, as `report` does in a cell."""
        self._worker.reporter.report(**values)

    def lift(self, definition: _Definition) -> _Definition:
        """Mark a function, or a class with its methods, as in `@job.lift`.

        nbdist runs the steps of its training loops on all replicas, as in a cell of the notebook.

        Args:
            definition: Function or class at the top of the program.

        Returns:
            The same function or class.

        Raises:
            UsageError: It is another object.
        """
        self._loops.mark(definition)
        return definition

    @contextlib.contextmanager
    def cell(self, *, shuffle_key: int | None = None, **options: Any) -> Iterator[None]:
        """Run statements in the scope of the strategy, as a cell of the notebook does.

        A `fit` in them trains on all ranks, and so does a function that `lift` marks.

        Args:
            shuffle_key: Number from which unseeded shuffles and `np.random.default_rng()` follow,
                with the seed.
            **options: Options of `%%dist_run`, with `_` for `-`, such as `precision="float16"`.
                `plan` is the name of a file beside the program, for the number of devices in it.

        Raises:
            UsageError: Options are wrong or have other names.
            StepError: Values that must be equal differ between ranks.
        """
        body = _body_of(_statement())
        request = self._request("\n".join(map(ast.unparse, body)), "", options)
        self._loops.rewrite()
        with self._begun(request, shuffle_key), self._scope(request):
            yield
            self._checks.end_cell(self._namespace, body)

    def run(
        self, function: Callable[[], Any], *, shuffle_key: int | None = None, **options: Any
    ) -> None:
        """Call a function as `cell` runs its statements, with its training loops as in `lift`.

        A checkpoint contains the values that the function reads or declares `global`.

        Args:
            function: Function without parameters, at the top of the program.
            shuffle_key: As in `cell`.
            **options: As in `cell`.

        Raises:
            UsageError: Options are wrong or have other names, or the function has decorators.
            StepError: Values that must be equal differ between ranks.
        """
        lines, first = inspect.getsourcelines(function)
        source = "".join(lines)
        request = self._request(cell_of(source), lines[0].strip(), options)
        (definition,) = ast.parse("\n" * (first - 1) + source).body
        assert isinstance(definition, ast.FunctionDef), "`cell_of` accepts only functions"
        self._loops.mark(function)
        self._loops.rewrite()
        with self._begun(request, shuffle_key), self._scope(request):
            function()
            self._checks.end_cell(self._namespace, definition.body)

    def train(
        self, step: Callable[..., Any], *, shuffle_key: int | None = None, **options: Any
    ) -> dict[str, list[float]]:
        """Call a step for each batch of a data set, on all ranks.

        Args:
            step: Function of `batch`, and of `mask` with `bucket`. It returns the loss, or a dict
                of scalars. Under JAX it declares names that it carries to the next step `global`.
            shuffle_key: As in `cell`.
            **options: Options of `%%dist_run`, with `_` for `-`. `data` is the name of the data.

        Returns:
            The values that the steps reported on this rank, by name.

        Raises:
            UsageError: Options are wrong, or the function is no step.
            StepError: The data, a value or a checkpoint does not fit.
        """
        lines, first = inspect.getsourcelines(step)
        path = inspect.getsourcefile(step) or "program"
        request = self._request(cell_of("".join(lines)), lines[0].strip(), options)
        if request.step is None:
            raise UsageError("data is missing: name the data set, as in data='train'")
        if inspect.signature(step).parameters.keys() != {*request.step.program.given}:
            given = ", ".join(request.step.program.given)
            raise UsageError(f"{step.__name__}: the parameters of a step are ({given})")
        define = _definer(self._namespace, path, first, step.__name__)
        self._progress.begin()
        with self._begun(request, shuffle_key), self._scope(request), self._stop_point() as stop:
            training_loop.check_names(request.step, self._namespace)
            runs = cell_scope.step_strategy(self._worker, request, define, self._namespace)
            training_loop.run(
                self._worker, request.step, self._namespace, runs, stop, request.saving
            )
        return self._progress.history

    def close(self) -> None:
        """Wait until all ranks have ended their work, and disconnect. Call it at the end."""
        self._close()
        self._peers.leave()
        self._store.close()

    def _request(self, source: str, header: str, options: dict[str, Any]) -> CellRequest:
        self._cells += 1
        devices = self.mesh.size if self._name == "pjrt" else 0
        found, self._remark = options_for(options, devices)
        return parse_cell(
            source,
            found,
            number=self._cells,
            label=self._cells,
            strategy=self._name,
            header=header,
        )

    def _scope(self, request: CellRequest) -> contextlib.AbstractContextManager[None]:
        return cell_scope.opened(self._worker, request, lambda: request.source, self._namespace)

    @contextlib.contextmanager
    def _begun(self, request: CellRequest, shuffle_key: int | None) -> Iterator[None]:
        """Begin a cell, and end it in any case. After SIGTERM, end the program too."""
        self._preemption.begin_cell()
        aligned = self._checks.align_generators()
        self._store.begin(request, _first_line(_statement()))
        self._worker.begin_cell(request, self._stop_point)
        if shuffle_key is not None:
            self._worker.cell_state.source = shuffle_key
        if request.options.seed is not None:
            seeding.seed_generators(request.options.seed)
        elif aligned:
            self._worker.reporter.note("strategy", aligned, warning=True)
        if self._remark:
            self._worker.reporter.note("compiled", self._remark)
        saves = request.saving is not None
        try:
            with self._preemption.admitted() if saves else contextlib.nullcontext():
                yield
        except BaseException as error:
            self._peers.await_end(error)
            self._worker.end_cell(error)
            self._store.end(request, error)
            if isinstance(error, KeyboardInterrupt) and self._preemption.is_requested:
                self._exit(request.saving)
            raise
        self._worker.end_cell()
        self._store.end(request, None)

    def _exit(self, saving: Saving | None) -> NoReturn:
        """Exit after SIGTERM.

        The status lets a scheduler start the program again if a checkpoint exists.
        """
        continues = saving is not None and bool(steps_in(Path(saving.folder)))
        if self._preemption.is_agreed:  # all ranks have ended the same steps
            continues = self._preemption.of_rank_0(continues)
            self._close()
        self._peers.leave()
        if self.rank == 0:
            text = f"nbdist: stopped by SIGTERM after step {self._worker.progress.step}: "
            if saving is not None and continues:
                text += f"start the program again to continue from {saving.folder}"
            else:
                text += "it has no checkpoint"
            sys.stderr.write(f"{text}\n")
        raise SystemExit(CONTINUES if continues else TERMINATED) from None

    @contextlib.contextmanager
    def _stop_point(self) -> Iterator[StopPoint]:
        """Return a stop point for SIGTERM. A keyboard interrupt ends a program at once."""
        worker, preemption = self._worker, self._preemption
        with worker.interrupts.deferred(is_pending=preemption.is_requested):
            yield StopPoint(worker.reporter, worker.interrupts, preemption.answer)


def _statement() -> ast.stmt | None:
    """Return the statement that calls a method of `Job`; None if it is in no file."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, contextlib.__name__):
        frame = frame.f_back
    assert frame is not None
    line = frame.f_lineno
    found: ast.stmt | None = None
    for node in ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            found = node  # outer statements come first
    return found


def _first_line(statement: ast.stmt | None) -> str:
    return ast.unparse(statement).partition("\n")[0] if statement is not None else ""


def _body_of(statement: ast.stmt | None) -> list[ast.stmt]:
    """Return the statements of a `with` block."""
    if not isinstance(statement, ast.With):
        raise UsageError("job.cell() begins a block: use `with job.cell():`")
    return statement.body


def _definer(
    namespace: dict[str, Any], path: str, first: int, name: str
) -> Callable[[str], Callable[..., Any]]:
    """Return a function that defines a step in the namespace, on the lines of the program."""
    filename = f"{Path(path).name}, {name}"

    def define(source: str) -> Callable[..., Any]:
        text = "\n" * (first - 1) + source
        store_source(filename, text)
        scope: dict[str, Callable[..., Any]] = {}
        exec(compile(text, filename, "exec", dont_inherit=True), namespace, scope)  # noqa: S102
        return scope["step"]

    return define


def _key(placement: Placement) -> bytes:
    """Return a key for the files of rank 0 that all processes of the program know."""
    words = f"{placement.coordinator} {placement.addresses}".encode()
    return hashlib.blake2b(words, digest_size=_KEY_BYTES).digest()


def _keep_seeds_of_operations() -> None:
    if private_tensorflow.SEEDS.is_supported("operations with a seed draw other numbers"):
        from nbdist.worker.tensorflow.runtime import operation_seed

        operation_seed.apply()


def _report_fits() -> None:
    from nbdist.worker.fit import callback as fit_callback

    fit_callback.apply()


def _build_mirrored(placement: Placement, communication: Communication) -> Connection:
    private_tensorflow.MIRRORED.check()
    from nbdist.worker.script import mirrored

    connection = mirrored.build(placement, communication)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # TensorFlow's handler does not end the process
    return connection


def _build_pjrt(placement: Placement, cpu_devices: int) -> Connection:
    coordinator = None
    if placement.rank == 0:
        port = int(placement.coordinator.rpartition(":")[2] or 0)
        coordinator = Coordinator(rendezvous.own_address(placement), placement.world_size, port)
    private_jax.PJRT.check()
    from nbdist.worker.script import pjrt

    return pjrt.build(placement, cpu_devices, coordinator)
