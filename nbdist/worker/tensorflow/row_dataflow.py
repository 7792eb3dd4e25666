"""Data flow of a compiled step: may its results be wrong on parts of some batches?

A step on parts of a batch is right for every batch if it computes each row alone and adds the rows
up. A mean over the positions of a mask is different: it divides by a sum over rows, which differs
between parts if some rows have more padding than others. Such a step has an operation on sums over
rows that is not linear. The search follows the batch through the graph, up to the collectives.

A function of a sum over rows that has a kink or a jump, such as `abs(loss - 0.1)`, is linear on
both sides of it. Trials of a step then show a difference only if the sums of the parts are on
different sides.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size", "ZerosLike", "OnesLike"})
"""Operations whose results do not depend on values."""

_LINEAR = frozenset(
    """
    AddN AddV2 All AssignAddVariableOp AssignSubVariableOp AssignVariableOp AvgPoolGrad
    BatchMatMulV2 BiasAdd BiasAddGrad ConcatV2 Conv2DBackpropFilter Conv2DBackpropInput
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum ExpandDims
    Identity IdentityN IsFinite LogicalAnd MatMul Mean MirrorPad MirrorPadGrad Neg NoOp Pack
    PreventGradient ReadVariableOp ResourceScatterAdd ReverseV2 Split Squeeze StopGradient
    StridedSliceGrad Sub Sum Transpose Unpack UnsortedSegmentSum
    """.split()  # noqa: SIM905 - a set of this size is easier to read as words
)
"""Operations that give, of a sum over rows, the sum of their results.

`All` and `IsFinite` are those of nbdist's test for finite numbers.
"""

_SELECTING = frozenset(
    """
    BroadcastTo GatherV2 Pad PadV2 Reshape ResourceGather Slice SplitV StridedSlice Tile
    """.split()  # noqa: SIM905
)
"""Operations that are linear in their first argument; the others are shapes or indices."""

_BY_ROW = frozenset(
    """
    Abs ArgMax ArgMin AvgPool Bitcast BitwiseAnd Cast ClipByValue Conv2D Cos DepthwiseConv2dNative
    Elu EluGrad Equal Erf Exp Expm1 Floor Greater GreaterEqual LeakyRelu LeakyReluGrad Less
    LessEqual Log Log1p LogSoftmax LogicalNot LogicalOr Max MaxPool MaxPoolGrad Maximum Min Minimum
    NotEqual OneHot Pow Prod Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Round Rsqrt
    RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax
    SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad SparseSoftmaxCrossEntropyWithLogits Sqrt
    SqrtGrad Square SquaredDifference Tanh TanhGrad Xdivy Xlogy
    """.split()  # noqa: SIM905
)
"""Operations that compute each row of their result from the same row of the arguments."""

_KINKS = frozenset(
    """
    Abs Ceil ClipByValue Equal Floor FloorDiv FloorMod Greater GreaterEqual If LeakyRelu Less
    LessEqual Maximum Minimum NotEqual Relu Relu6 Round SelectV2 Sign StatelessIf Where
    """.split()  # noqa: SIM905
)
"""Operations whose result or derivative jumps."""

_CHOICES = frozenset({"If", "SelectV2", "StatelessIf"})
"""Operations that are linear, except in their first argument."""

_REDUCTIONS = frozenset({"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"})
_TESTS = frozenset({"IsFinite", "IsInf", "IsNan"})
"""Operations of tests for finite numbers, which are false in no usual step."""

BODIES = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
}
"""Attributes of an operation that name the graphs which it runs."""

_EFFECTS = {
    "EagerPyFunc": "calls Python by tf.py_function",
    "PyFunc": "calls Python by tf.numpy_function",
    "PrintV2": "prints by tf.print",
}
"""Operations with an effect outside of the step, besides those whose name begins with `Write`."""

_PRODUCTS = frozenset({"Mul", "MulNoNan"})
_QUOTIENTS = frozenset({"RealDiv", "DivNoNan"})


def host_effect(graph: tf.Graph) -> str:
    """Describe an operation that acts outside of the step, such as a call of Python; or empty.

    Replicas would repeat it with parts of a batch, and trials too.
    """
    operations = graph.get_operations()
    inner = [f.graph.get_operations() for f in graph._functions.values()]  # branches and loops
    for operation in itertools.chain(operations, *inner):
        kind = operation.type
        if kind in _EFFECTS or kind.startswith("Write"):
            return _EFFECTS.get(kind, "writes a summary or a file")
    return ""


def depends_on_kinds(graph: tf.Graph, rows: int) -> bool:
    """Return True if the results may be wrong on parts of batches with certain rows.

    Args:
        graph: graph of the step on one part. Its arguments are the arrays of the batch.
        rows: number of rows of the part.

    Returns:
        True too for operations that are not known.
    """
    flow = on_own_rows(graph, arguments(graph))
    return any(not _is_safe(operation, given, rows) for operation, given in flow)


def on_own_rows(
    graph: tf.Graph, reached: set[str]
) -> Iterator[tuple[tf.Operation, list[tf.Tensor]]]:
    """Yield the operations on values of the replica's own rows, with these inputs.

    Args:
        graph: graph of the step on one part, or of a branch or loop in it.
        reached: names of its arguments of own rows. The names of further values are added.
    """
    for operation in graph.get_operations():  # in the order of the data flow
        given = [tensor for tensor in operation.inputs if tensor.name in reached]
        if not given or operation.type in _SHAPES or operation.type.startswith("Collective"):
            continue
        yield operation, given
        reached |= _own_outputs(operation, reached)
        if operation.type.startswith("Assign"):
            reached.add(operation.inputs[0].name)  # the variable, which later operations read


def arguments(graph: tf.Graph) -> set[str]:
    """Return the names of a graph's arguments, without values that it captures."""
    captured = {tensor.name for tensor in graph.internal_captures}
    return {tensor.name for tensor in graph.inputs} - captured


def kink(graph: tf.Graph, rows: int, decisions: Iterable[str] = ()) -> str:
    """Describe an operation with a kink on a sum over the rows; empty without one.

    Args:
        graph: graph of the step on one part, as for `depends_on_kinds`.
        rows: number of rows of the part.
        decisions: names of tensors without rows that are true or false.
    """
    reached = arguments(graph)
    sums: set[str] = set()
    decided = set(decisions)
    for operation in graph.get_operations():
        given = {tensor.name for tensor in operation.inputs} & reached
        kind = operation.type
        if given and any(tensor.name in decided for tensor in operation.outputs):
            return "has a result that is true or false for all rows of a batch"
        if not given or kind in _SHAPES | _TESTS or kind.startswith("Collective"):
            continue
        decides = operation.inputs[:1] if kind in _CHOICES else operation.inputs
        if kind in _KINKS and any(tensor.name in sums for tensor in decides):
            return f"applies `{kind}` to a mean or sum over the rows of a batch"
        reached |= _outputs(operation, given)
        if given <= sums or (kind in _REDUCTIONS and _adds_rows(operation, rows)):
            sums |= _outputs(operation, given)
    return ""


def _own_outputs(operation: tf.Operation, own: Set[str]) -> set[str]:
    """Return the names of the results that depend on own rows, also of branches and loops."""
    if operation.type not in BODIES:
        return _outputs(operation, own)
    places: set[int] = set()
    for name in BODIES[operation.type]:
        given = own_arguments(operation, name, own)
        if is_decided_by(operation, name, own):
            return {tensor.name for tensor in operation.outputs}
        # Without a pass of a loop, its results are its arguments.
        places |= given if name == "body" else _own_results(body_of(operation, name), given)
    return {tensor.name for place, tensor in enumerate(operation.outputs) if place in places}


def body_of(operation: tf.Operation, name: str) -> tf.Graph:
    """Return the graph that an attribute of an operation names."""
    return operation.graph._functions[operation.get_attr(name).name].graph


def passed_to(operation: tf.Operation, body: tf.Graph) -> list[tf.Tensor]:
    """Return the values that an operation passes to the arguments of a graph in it."""
    return list(operation.inputs)[-len(body.inputs) :] if body.inputs else []


def own_arguments(operation: tf.Operation, name: str, own: Set[str]) -> set[int]:
    """Return the places of the arguments of a branch, body or function that depend on own rows."""
    body = body_of(operation, name)
    places = {n for n, tensor in enumerate(passed_to(operation, body)) if tensor.name in own}
    if name == "body":
        while (more := places | _own_results(body, places)) != places:
            places = more
    return places


def is_decided_by(operation: tf.Operation, name: str, own: Set[str]) -> bool:
    """Return True if own rows decide whether a branch or a body runs."""
    if name == "body":
        places = own_arguments(operation, name, own)
        return bool(_own_results(body_of(operation, "cond"), places))
    return name != "f" and operation.inputs[0].name in own


def _own_results(graph: tf.Graph, places: Set[int]) -> set[int]:
    """Return the places of the results that depend on arguments of own rows."""
    reached = arguments_at(graph, places)
    for _ in on_own_rows(graph, reached):
        pass
    return {place for place, tensor in enumerate(graph.outputs) if tensor.name in reached}


def arguments_at(graph: tf.Graph, places: Set[int]) -> set[str]:
    """Return the names of the arguments of a graph at these places."""
    return {tensor.name for place, tensor in enumerate(graph.inputs) if place in places}


def _outputs(operation: tf.Operation, given: Set[str]) -> set[str]:
    """Return the names of the results of an operation that depend on the `given` tensors.

    TensorFlow passes arguments and results of a function with its own gradient, such as the
    all-reduce of a replica, through one `IdentityN`.
    """
    if operation.type != "IdentityN":
        return {tensor.name for tensor in operation.outputs}
    pairs = zip(operation.inputs, operation.outputs, strict=True)
    return {output.name for source, output in pairs if source.name in given}


def _adds_rows(reduction: tf.Operation, rows: int) -> bool:
    """Return True if a reduction has one result for all rows."""
    source, axes = reduction.inputs
    if reduction.outputs[0].shape.rank == 0:
        return True
    found = tf.get_static_value(axes)
    return _has_rows(source, rows) and found is not None and 0 in set(found.reshape(-1).tolist())


def _is_safe(operation: tf.Operation, tensors: list[tf.Tensor], rows: int) -> bool:
    """Return True if an operation on values of the batch is linear, or computes each row alone."""
    kind = operation.type
    if kind in _LINEAR or (kind == "Cast" and _keeps_fractions(operation)):
        return True
    sums = {tensor.name for tensor in tensors if not _has_rows(tensor, rows)}
    if kind in _SELECTING:
        return not any(tensor.name in sums for tensor in operation.inputs[1:])
    if kind in _PRODUCTS:
        return len([tensor for tensor in tensors if tensor.name in sums]) < 2
    if kind in _QUOTIENTS:
        return operation.inputs[1].name not in sums
    return kind in _BY_ROW and not sums and _has_rows(operation.outputs[0], rows)


def _keeps_fractions(cast: tf.Operation) -> bool:
    source, target = cast.get_attr("SrcT"), cast.get_attr("DstT")
    return bool(target.is_floating or (source.is_integer and target.is_integer))


def _has_rows(tensor: tf.Tensor, rows: int) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] == rows
