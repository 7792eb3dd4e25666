"""Run a cell on a rank and report its result to the notebook."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist.records import SOON, CellEnded, CellRequest, Display, Failure, StopAfter
from nbdist.utils.allocator import return_freed_memory
from nbdist.worker import cell_scope
from nbdist.worker.keras import backend as keras_backend
from nbdist.worker.lifting import module_loops, passes, rewritten_loops
from nbdist.worker.own_modules import finder
from nbdist.worker.own_modules.reload import note_imports, reload_changed
from nbdist.worker.runtime import context, rng_alignment, seeding
from nbdist.worker.runtime.reporter import connect
from nbdist.worker.runtime.shell import engine_shell
from nbdist.worker.runtime.stop_point import StopPoint
from nbdist.worker.training import loop as training_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

    from nbdist.records import Replicated, SocketAddress, StepRequest, StrategyName


class _Program(msgspec.Struct, frozen=True):
    """A compiled cell: its statements, and its last expression if the cell displays it."""

    body: CodeType
    value: CodeType | None


def take_cells(address: SocketAddress) -> None:
    """Run every cell that arrives from `address` on the engine's event loop, on this thread.

    ipykernel handles its requests on the same loop, so only one thing runs at a time.
    """
    context.current().interrupts.install()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.routing_id = str(context.current().rank).encode()
    connect(socket, address)
    stream = ZMQStream(socket)
    _command_sockets.append(socket)
    stream.on_recv(_take)
    stream.send(b"")


def _take(frames: list[bytes]) -> None:
    command = _decode(frames[0])
    if isinstance(command, StopAfter) or not context.current().may_begin(command.number):
        return  # the cell has ended already, or this rank has refused it
    cell = _Cell(command)
    if cell.awaits:
        task = asyncio.ensure_future(cell.run_async())
        _awaiting.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(_awaiting.discard)
        task.add_done_callback(lambda _task: _leave_if_preempted())
    else:
        cell.run()
        _leave_if_preempted()


def _leave_if_preempted() -> None:
    if context.current().preempted:
        context.current().reporter.close()
        sys.exit(0)


def _decode(frame: bytes) -> CellRequest | StopAfter:
    return msgspec.msgpack.decode(frame, type=CellRequest | StopAfter)


_COLLECTIVE_FAILURES: dict[StrategyName | None, tuple[str, ...]] = {
    "mirrored": ("Collective ops is aborted",),
    "pjrt": ("Gloo ", "NCCL "),
}
"""Parts of the errors of failed collectives; afterwards, all collectives of the strategy fail."""

_command_sockets: list[zmq.Socket[bytes]] = []
_awaiting: set[asyncio.Task[None]] = set()


class _Cell:
    """One cell on one rank, from its source to its `CellEnded`."""

    def __init__(self, request: CellRequest) -> None:
        self.awaits = request.awaits
        self._request = request
        self._worker = context.current()
        self._shell = engine_shell()
        self._replicated: tuple[Replicated, ...] = ()
        self._interrupts = self._worker.interrupts
        self._worker.begin_cell(request, self._stop_point)

    def run(self) -> None:
        step = self._request.step
        if step is None:
            with (
                self._report_result(),
                self._strategy(),
                self._interrupts.admitted(),
                self._planned(),
            ):
                self._run_compared()
        else:
            with (
                self._report_result(),
                self._strategy(),
                self._stop_point() as stop,
                self._interrupts.admitted(),
            ):
                self._run_steps(step, stop)

    def _planned(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `fit` only plans, if the request is only for a plan."""
        if not self._request.planning.only:
            return contextlib.nullcontext()
        importlib.import_module("keras")  # first: the patches below must apply to this module
        from nbdist.worker.jax.keras.planning import instead_of_fit

        return instead_of_fit(self._request.planning, self._worker)

    def _run_once(self) -> None:
        program = self._compile()
        exec(program.body, self._shell.user_ns)  # noqa: S102 - the user's own cell
        if program.value is not None:
            self._show(eval(program.value, self._shell.user_ns))  # noqa: S307
        self._shell.events.trigger("post_execute")

    def _run_compared(self) -> None:
        """Run the cell, then digest the values that must be equal on all ranks."""
        self._run_once()
        cell_scope.check_options_used(self._worker)
        passes.check_reached(self._worker)
        self._replicated = cell_scope.replicated_values(self._worker, self._shell.user_ns)

    async def run_async(self) -> None:
        with (
            self._report_result(),
            self._strategy(),
            self._interrupts.admitted(asyncio.current_task()),
        ):
            program = self._compile()
            await _evaluate(program.body, self._shell.user_ns)
            if program.value is not None:
                self._show(await _evaluate(program.value, self._shell.user_ns))
            self._shell.events.trigger("post_execute")
            self._replicated = cell_scope.replicated_values(self._worker, self._shell.user_ns)

    @contextlib.contextmanager
    def _report_result(self) -> Iterator[None]:
        """Report the result of the cell to the notebook, whatever it is. Raises nothing."""
        try:
            if self._request.generators:
                rng_alignment.restore(self._request.generators)
            if self._request.options.seed is not None:
                seeding.seed_generators(self._request.options.seed)
            yield
        except BaseException as error:  # noqa: BLE001 - the boundary: the notebook shows it
            self._end(error)
        else:
            self._end(None)
        return_freed_memory()

    def _run_steps(self, request: StepRequest, stop: StopPoint) -> None:
        namespace = self._shell.user_ns
        self._reload_modules()
        training_loop.check_names(request, namespace)
        step_strategy = cell_scope.step_strategy(
            self._worker, self._request, self._define, namespace
        )
        training_loop.run(
            self._worker, request, namespace, step_strategy, stop, self._request.saving
        )

    @contextlib.contextmanager
    def _stop_point(self) -> Iterator[StopPoint]:
        command = self._stop_command(0)
        with self._interrupts.deferred(is_pending=command is not None and command.step == SOON):
            yield StopPoint(self._worker.reporter, self._interrupts, self._stop_command)

    def _stop_command(self, seconds: float) -> StopAfter | None:
        """Wait up to `seconds` for the notebook's command to stop this cell.

        Returns:
            The command, whose step is `SOON` until the notebook knows the last step. None if no
            command arrived.
        """
        (socket,) = _command_sockets
        while socket.poll(int(1000 * seconds)):
            command = _decode(socket.recv())
            if isinstance(command, StopAfter) and command.number == self._request.number:
                return command
        return None

    def _define(self, source: str) -> Callable[..., Any]:
        """Define the step function in the user's namespace, with source for tracebacks."""
        filename = self._shell.compile.cache(source, self._request.label)
        scope: dict[str, Callable[..., Any]] = {}
        exec(compile(source, filename, "exec", dont_inherit=True), self._shell.user_ns, scope)  # noqa: S102
        return scope["step"]

    def _strategy(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope of the cell, with its precision."""
        return cell_scope.opened(
            self._worker, self._request, lambda: self._source, self._shell.user_ns
        )

    @functools.cached_property
    def _source(self) -> str:
        """Text of the cell, without magics."""
        return str(self._shell.transform_cell(self._request.source))

    def _compile(self) -> _Program:
        """Compile under a name that IPython's tracebacks show as `Cell In[label]`."""
        self._reload_modules()
        source = self._source
        filename = self._shell.compile.cache(source, self._request.label, self._request.source)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self._request.awaits else 0
        tree = ast.parse(source, filename)
        if keras_backend.VARIABLE in source:
            keras_backend.refuse_another(tree)
        if self._request.strategy is not None and not self._request.options.no_lift:
            cell_scope.use_loops(self._worker)
            names, strategy = self._shell.user_ns, self._request.strategy
            module_loops.lift_modules(names, strategy)
            label = self._request.label
            tree = rewritten_loops.rewritten(tree, source, names, strategy, label=label) or tree
        value = None
        is_silent = source.rstrip().endswith(";")  # as in IPython
        if tree.body and isinstance(last := tree.body[-1], ast.Expr) and not is_silent:
            tree.body.pop()
            value = compile(
                ast.Expression(last.value), filename, "eval", flags=flags, dont_inherit=True
            )
        body = compile(tree, filename, "exec", flags=flags, dont_inherit=True)
        note_imports(tree)
        return _Program(body, value)

    def _reload_modules(self) -> None:
        """Use the current text of the user's own modules."""
        while deleted := finder.install().deleted:
            text = f"the files of your module `{deleted.pop()}` are gone: workers keep it loaded"
            self._worker.reporter.note("strategy", f"{text} until %dist_restart", warning=True)
        for name in reload_changed(self._shell.user_ns):
            text = f"the workers use an earlier text of `{name}`: its last reload failed"
            self._worker.reporter.note("strategy", text, warning=True)

    def _show(self, value: object) -> None:
        if value is None:
            return
        data, metadata = self._shell.display_formatter.format(value)
        reporter = self._worker.reporter
        reporter.send(
            Display(data=data, metadata=metadata, result=True, **reporter.record_fields())
        )

    def _end(self, error: BaseException | None) -> None:
        self._interrupts.refuse()
        interrupted = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        failed = error is not None and self._is_collective_failure(error)
        if error is not None and "pjrt" in self._worker.strategies:
            from nbdist.worker.jax import backend as jax_backend

            jax_backend.note_unready()
        failure = None if error is None else self._describe(error, follows=failed)
        self._worker.cell_state.unfinished |= failed
        try:
            self._worker.end_cell(error)
        except Exception as trouble:  # noqa: BLE001 - the notebook must learn that the cell is over
            error = error or trouble
            failure = failure or self._describe(trouble, follows=False)
        generators = rng_alignment.States.now()
        ended = CellEnded(
            status="interrupted" if interrupted else "error" if error else "ok",
            seconds=self._worker.reporter.seconds(),
            failure=failure,
            unfinished=self._worker.cell_state.unfinished,
            replicated=self._replicated if error is None else (),
            collective_keys=self._worker.collective_keys(),
            generators=generators.digests(),
            generator_states=b"" if self._worker.rank else generators.packed(),
            fits=fits.packed() if (fits := self._worker.cell_state.fits) else b"",
            disk_modules=finder.install().from_disk(),
            rank=self._worker.rank,
            cell=self._request.number,
        )
        self._worker.ended = ended
        self._worker.reporter.send(ended, urgent=True)

    def _is_collective_failure(self, error: BaseException) -> bool:
        """Return True if the error reports failed collectives: the cause is then elsewhere."""
        from nbdist.worker import failure  # only cells that fail load it

        text = failure.message(error)
        return any(words in text for words in _COLLECTIVE_FAILURES.get(self._request.strategy, ()))

    def _describe(self, error: BaseException, *, follows: bool) -> Failure:
        from nbdist.worker import failure

        return failure.describe(error, self._shell, follows=follows or bool(self._worker.broken))


async def _evaluate(code: CodeType, namespace: dict[str, Any]) -> object:
    result = eval(code, namespace)  # noqa: S307 - the user's own cell
    return await result if inspect.iscoroutine(result) else result
