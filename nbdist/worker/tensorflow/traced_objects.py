"""Values that the traces of a step assign and that are no tensors, such as numbers of Python."""

from __future__ import annotations

from typing import Any

_COMPARED = (bool, int, float, str)


class TracedObjects:
    """Values by name, for each trace of a step.

    A step has a trace for each kind of batch, and a name may have another value in each.

    Attributes:
        values: values of the trace that ran last.
        of_whole: values of a trace on one replica, with all rows of a batch.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.of_whole: dict[str, Any] = {}
        self._by_graph: dict[Any, dict[str, Any]] = {}
        self._counts: set[str] = set()

    def note(self, graph: Any, values: dict[str, Any]) -> None:
        """Note the values of a new trace."""
        self._by_graph[graph] = self.values = values

    def forget_traces(self) -> None:
        """Forget all traces, whose graphs would remain in memory."""
        self._by_graph.clear()

    def use(self, graph: Any) -> None:
        """Note that the trace with this graph runs. Traces of step cells have no values."""
        self.values = self._by_graph.get(graph, {})

    def value(self, name: str, rows: int) -> Any:
        """Return the value of a name in the last step, whose global batch has these rows.

        Raises:
            KeyError: the step has not assigned the name.
        """
        value = self.values[name]
        return rows if name in self._counts and type(value) is int else value

    def continue_from(self, other: TracedObjects) -> None:
        """Take over which names are numbers of rows."""
        self._counts |= other._counts

    def unequal(self, graph: Any, rows: int, replicas: int) -> str:
        """Return the name of another number or text than with all rows; or empty.

        `n = x.shape[0]` is a number of rows. From then on, `value` returns that of the batch.

        Args:
            graph: graph of the trace on parts of a batch.
            rows: number of rows of the batch.
            replicas: number of the parts.
        """
        own = self._by_graph[graph]
        for name in sorted(own.keys() & self.of_whole.keys()):
            part, whole = own[name], self.of_whole[name]
            if type(part) is int and (part, whole) == (rows // replicas, rows) and replicas > 1:
                self._counts.add(name)
            elif isinstance(part, _COMPARED) and isinstance(whole, _COMPARED) and part != whole:
                return name
        return ""
