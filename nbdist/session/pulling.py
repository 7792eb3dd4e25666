"""Copy of objects from the workers to the notebook.

Large arrays arrive in pieces, in memory that is allocated once. Of an array that is sharded over
ranks, each rank sends its own shards, and no rank gathers it.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import secrets
from typing import TYPE_CHECKING, Any

from nbdist.cluster.payload_server import Links
from nbdist.errors import TransferError, WorkerError
from nbdist.worker.remote import offers, transfer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from nbdist.cluster.engines import Engines
    from nbdist.worker.remote.offers import Offer, OfferedArray

    Ready = Callable[[Sequence[int]], Engines]
    Arrays = dict[tuple[int, int], np.ndarray]
    """Arrays by rank and by index in the rank's offer."""

_FRAMEWORKS = frozenset({"tensorflow", "keras", "jax", "jaxlib", "flax"})
_RELEASE_S = 5.0
"""Time to wait until ranks have released the arrays of a pull. Busy ranks do so later."""


def pull(ready: Ready, names: Sequence[str], ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return objects by rank and name; see `Cluster.pull`.

    Args:
        ready: returns the engines, to call functions on ranks that run no cell.
        names: names on the ranks.
        ranks: the ranks to copy from.

    Raises:
        WorkerError: a rank is dead, or still runs a cell.
        TransferError: the copy failed. See `Cluster.pull`.
    """
    engines = ready(ranks)
    try:
        missing = engines.apply(transfer.missing, list(names), ranks=ranks)
        lacking = {rank: lost for rank, lost in zip(ranks, missing, strict=True) if lost}
        if lacking:
            text = "; ".join(f"rank {rank}: {', '.join(lost)}" for rank, lost in lacking.items())
            raise TransferError(
                f"no such name on the workers ({text}): define it in a %%dist_run cell"
            )
        return _Pull(ready, list(names), ranks).objects()
    except WorkerError as error:
        raise TransferError(str(error)) from None


class _Pull:
    """One copy of objects.

    Args:
        ready: returns the engines, to call functions on ranks that run no cell.
        names: names that all `ranks` have.
        ranks: the ranks to copy from.
    """

    def __init__(self, ready: Ready, names: list[str], ranks: Sequence[int]) -> None:
        self._ready = ready
        self._engines = ready(ranks)
        self._names = names
        self._ranks = ranks
        self._id = secrets.token_hex(16)
        self._offers: dict[int, Offer] = {}
        self._received = 0

    def objects(self) -> dict[int, dict[str, Any]]:
        """Return the objects by rank and name."""
        self._ask(self._ranks)
        arrays: Arrays = {}
        try:
            if any(array.split for offer in self._offers.values() for array in offer.arrays):
                every = range(self._engines.world_size)
                self._ready(every)
                self._ask([rank for rank in every if rank not in self._offers])
                self._require_equal()
            if any(offer.arrays for offer in self._offers.values()):
                arrays = self._allocated()
                self._receive(arrays)
        finally:
            self._release()
        return {
            rank: read_objects(
                self._offers[rank].content,
                {i: array for (of, i), array in arrays.items() if of == rank},
            )
            for rank in self._ranks
        }

    def _ask(self, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        found = self._engines.apply(offers.offer, self._id, self._names, ranks=ranks)
        self._offers.update(zip(ranks, found, strict=True))

    def _require_equal(self) -> None:
        """Raise TransferError unless all ranks have the same sharded arrays, in the same order."""
        split = {r: tuple(a.split for a in o.arrays if a.split) for r, o in self._offers.items()}
        if len(set(split.values())) > 1:
            listed = "\n".join(
                f"rank {r}: {'; '.join(s) or 'none'}" for r, s in sorted(split.items())
            )
            raise TransferError(
                f"the ranks have different arrays that are split over them:\n{listed}\n"
                "Gather each in a cell first: multihost_utils.process_allgather(x, tiled=True)"
            )

    def _allocated(self) -> Arrays:
        """Return empty arrays. All ranks share those that are sharded over them."""
        arrays: Arrays = {}
        shared: list[np.ndarray] = []
        for rank, offer in self._offers.items():
            count = 0
            for index, array in enumerate(offer.arrays):
                if array.split:
                    if count == len(shared):
                        shared.append(_empty(array))
                    arrays[rank, index] = shared[count]
                    count += 1
                elif rank in self._ranks:
                    arrays[rank, index] = _empty(array)
        self._require_whole(arrays)
        return arrays

    def _require_whole(self, arrays: Arrays) -> None:
        """Raise TransferError if the parts of the ranks are not exactly their arrays."""
        covered: dict[int, int] = {}
        for (rank, index), array in arrays.items():
            boxes = self._offers[rank].arrays[index].boxes
            sizes = [math.prod(cut.stop - cut.start for cut in box) for box in boxes]
            covered[id(array)] = covered.get(id(array), 0) + sum(sizes)
        if any(covered[id(array)] != array.size for array in arrays.values()):
            raise TransferError("the shards of the ranks do not add up to the arrays: pull again")

    def _receive(self, arrays: Arrays) -> None:
        """Receive the parts of all arrays."""
        wanted: dict[int, list[int]] = {}
        for rank, index in arrays:
            wanted.setdefault(rank, []).append(index)
        left = set(wanted)

        def serve(link: ssl.SSLSocket, number: int) -> None:
            for index in wanted[number]:
                self._fill(arrays[number, index], self._offers[number].arrays[index], link)
            left.discard(number)
            link.sendall(b"\0")  # the rank waits for it

        engines = self._engines
        with engines.fleet.payload_listener() as listener, Links(listener, serve) as links:
            requests = {
                rank: offers.Request(
                    pull=self._id,
                    arrays=tuple(indices),
                    notebook=engines.fleet.service(engines.places.host(rank), listener.port),
                    secret=links.secret,
                )
                for rank, indices in wanted.items()
            }
            engines.apply(
                offers.send, requests, ranks=list(wanted), progress=lambda: self._received
            )
        if left:
            raise TransferError(
                f"rank {min(left)} did not send all parts of its arrays: pull again"
            )

    def _fill(self, array: np.ndarray, offered: OfferedArray, link: ssl.SSLSocket) -> None:
        """Receive the parts of an array from one rank."""
        import numpy as np

        buffer = memoryview(bytearray(max(offers.SLAB_BYTES, array.itemsize)))
        for box in offered.boxes:
            part: np.ndarray = array[(*box, ...)]  # type: ignore[arg-type]
            part = part.T if offered.is_fortran else part
            for slab in offers.slabs(part.shape, part.itemsize):
                target = part[(*slab, ...)]
                _read(link, buffer[: target.nbytes])
                self._received += target.nbytes
                target[...] = np.frombuffer(buffer, array.dtype, target.size).reshape(target.shape)

    def _release(self) -> None:
        """Let ranks forget the arrays. Those that are busy do so later."""
        dead = self._engines.dead()
        ranks = [r for r, offer in self._offers.items() if offer.arrays and r not in dead]
        if ranks:
            with contextlib.suppress(WorkerError), self._engines.within(_RELEASE_S):
                self._engines.apply(offers.release, self._id, ranks=ranks)


def _empty(offered: OfferedArray) -> np.ndarray:
    import numpy as np

    return np.empty(offered.shape, offered.dtype, "F" if offered.is_fortran else "C")


def _read(link: ssl.SSLSocket, view: memoryview) -> None:
    """Fill a buffer from a connection."""
    done = 0
    while done < len(view):
        count = link.recv_into(view[done:])
        if not count:
            raise ConnectionError("the connection was closed")
        done += count


def read_objects(payload: bytes, arrays: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Return the dict that a rank sent.

    Args:
        payload: the pickled dict.
        arrays: the arrays that it sent in parts.

    Raises:
        TransferError: an object cannot be read here, or needs a framework. The notebook does not
            import frameworks.
    """
    try:
        objects: dict[str, Any] = _WithoutFrameworks(payload, arrays).load()
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"the notebook cannot read the worker's object: {error}") from error
    return objects


class _WithoutFrameworks(pickle.Unpickler):
    def __init__(self, payload: bytes, arrays: Mapping[int, np.ndarray]) -> None:
        super().__init__(io.BytesIO(payload))
        self._arrays = arrays

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (offers.__name__, offers.offered.__name__):
            return self._arrays.__getitem__
        if module.split(".")[0] in _FRAMEWORKS:
            raise TransferError(
                f"{module}.{name} needs {module.split('.')[0]}, and the notebook does not import "
                "it: pull the values in the object instead, such as .history of a History"
            )
        return super().find_class(module, name)
