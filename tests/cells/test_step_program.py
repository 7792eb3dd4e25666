from __future__ import annotations

import ast
import builtins
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.cells.names import Names
from nbdist.cells.step_program import compile_step
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from nbdist.records import StepProgram

HEAD = "# %%dist_run --data train\n"


def step(body: str, *, carries: bool = True) -> StepProgram:
    return compile_step(HEAD + textwrap.dedent(body), given=("batch",), carries=carries)


def call(program: StepProgram, batch: object, **namespace: object) -> Any:
    """Run the rewritten step once, with the carried names as parameters."""
    head = f"def step({', '.join((*program.carried, 'batch'))}):\n"
    scope = dict(namespace)
    exec(head + program.body, scope)
    return scope["step"](*(namespace[name] for name in program.carried), batch)  # type: ignore[operator]


# Names that a step reads and carries.


@pytest.mark.parametrize(
    ("body", "reads", "carried"),
    [
        ("loss = f(batch)", {"f"}, ()),
        ("total = total + batch\nloss = total", set(), ("total",)),
        ("total += batch\nloss = total", set(), ("total",)),
        ("a, *rest = batch\nloss = a + b", {"b"}, ()),
        ("if flag:\n    x = 1\nloss = x", {"flag"}, ("x",)),
        ("if flag:\n    x = 1\nelse:\n    x = 2\nloss = x", {"flag"}, ()),
        ("for i in batch:\n    x = i\nloss = x", set(), ("x",)),
        ("loss = sum(w * i for i in batch)", {"w"}, ()),
        ("loss = sum([(last := i) for i in batch]) + last", set(), ("last",)),
        ("def g(x, k=k0):\n    y = x * w\n    return y + k\nloss = g(batch)", {"k0", "w"}, ()),
        ("loss = (lambda x: x * w)(batch)", {"w"}, ()),
        ("import math as m\nloss = m.floor(batch)", set(), ()),
        ("with tape as t:\n    y = 1\nloss = t", {"tape"}, ()),
        ("try:\n    x = f(batch)\nexcept E as e:\n    x = 0\nloss = 1.0", {"E", "f"}, ()),
        ("max = 2\nloss = max", set(), ()),
        ("def max(a):\n    return a\nloss = max(batch)", set(), ()),
        ("def f():\n    return g()\ndef g():\n    return w\nloss = f()", {"w"}, ()),
        ("def f():\n    return m.pi\nimport math as m\nloss = f()", set(), ()),
        ("class A:\n    def f(self):\n        return A()\nloss = 1.0", set(), ()),
        ("def f():\n    return f()\nloss = 1.0", set(), ()),
        ("def f():\n    return k\nk = 2\nloss = f()", set(), ("k",)),
        ("x: int = 3\nloss = x", set(), ()),
        ("x = 1\ndel x\nloss = 1.0", set(), ()),
        ("class A:\n    z = w\nloss = A.z", {"w"}, ()),
        ("match batch:\n    case [a, *b]:\n        pass\nloss = 1.0", set(), ()),
    ],
)
def test_reads_and_carried_names_are_found(
    body: str, reads: set[str], carried: tuple[str, ...]
) -> None:
    program = step(body)
    assert set(program.reads) == reads
    assert program.carried == carried


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(2):\n    d = batch",
        "for _ in range(1, 3):\n    d = batch",
        "for _ in (1, 2):\n    d = batch",
        "for _ in range(2):\n    for i in batch:\n        break\n    d = batch",
        "for _ in batch:\n    pass\nelse:\n    d = batch",
        "match batch:\n    case 1:\n        d = 1\n    case _:\n        d = 2",
        "match batch:\n    case [d]:\n        pass\n    case d:\n        pass",
        "try:\n    d = batch\nfinally:\n    pass",
        "try:\n    pass\nfinally:\n    d = batch",
        "try:\n    d = batch\nexcept ValueError:\n    raise",
        "try:\n    d = batch\nexcept ValueError:\n    d = 2",
        "import sys\ntry:\n    d = batch\nexcept ValueError:\n    sys.exit(1)",
        "for _ in batch:\n    if batch:\n        d = 1\n    else:\n        continue\n    +d\nd = 1",
        "if batch:\n    d = 1\nelse:\n    raise ValueError",
        "if batch:\n    d = 1\nelif not batch:\n    raise ValueError\nelse:\n    raise TypeError",
    ],
)
def test_control_flow_that_always_binds_carries_nothing(body: str) -> None:
    assert step(body + "\n{'d': d}").carried == ()


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(0):\n    d = batch",
        "for _ in range(batch):\n    d = batch",
        "for _ in [*batch]:\n    d = batch",
        "for _ in range(2):\n    if batch:\n        break\n    d = batch",
        "for _ in range(2):\n    try:\n        d = 1\n    except ValueError:\n        continue",
        "for _ in batch:\n    break\nelse:\n    d = batch",
        "match batch:\n    case 1:\n        d = 1\n    case _ if batch:\n        d = 2",
        "match batch:\n    case 1:\n        d = 1",
        "try:\n    d = batch\nexcept ValueError:\n    pass",
        "try:\n    d = batch\nfinally:\n    print(d)",
        "if batch:\n    with swallow:\n        raise ValueError\nelse:\n    d = 1",
    ],
)
def test_control_flow_that_may_not_bind_carries_the_name(body: str) -> None:
    assert step(body + "\n{'d': d}").carried == ("d",)


def test_reads_have_their_line() -> None:
    assert step("x = 1\nloss = f(x)").reads == {"f": 3}


# Results of a step.


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("loss = batch * 2", 14),
        ("loss = batch * 2\nloss", 14),
        ("y = batch\n{'a': y,\n 'b': y + 1}", {"a": 7, "b": 8}),
        ("é = batch; 'ü' and é + 1", 8),
        ("(batch +\n  1)", 8),
        ("x = '''one\ntwo'''\nlen(x) + batch", 14),
        ("if batch:\n    x = '''a\n  b'''\nelse:\n    x = ''\nloss = len(x)", 5),
        ("batch  # a comment", 7),
        ("batch;", 7),
        ("loss = batch\nprint('a call is no report')", 7),
        ("abs(-batch)", 7),
        ("loss = batch\ndict(loss=loss, acc=1)", {"loss": 7, "acc": 1}),
        ("loss = batch\nloss / 2", 3.5),
        ("loss = batch\n-loss", -7),
        ("loss = batch\n...", 7),
        ("loss = batch\n'a note'", 7),
        ("loss = batch\n{'a': 1, **{}}", {"a": 1}),
    ],
)
def test_the_last_expression_is_the_report(body: str, report: object) -> None:
    assert call(step(body), 7) == (report, ())


@pytest.mark.parametrize(
    "body",
    [
        "x = batch",
        "x = batch\n'a note'",
        "x = batch\n...",
        "if batch:\n    loss = 1.0",
        "optimizer.apply_gradients([])",
        "seen.append(batch)",
        "a_loss = b_loss = batch",
    ],
)
def test_a_step_may_report_nothing(body: str) -> None:
    program = step(body)
    assert program.report == ""
    optimizer = SimpleNamespace(apply_gradients=lambda _pairs: 3)
    assert call(program, 7, optimizer=optimizer, seen=[]) == (None, ())


TAPE = """
with GradientTape() as tape:
    {name} = batch + 1
grads = tape.gradient({name}, [])
"""


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (TAPE.format(name="cost"), "cost"),
        (TAPE.format(name="objective") + "optimizer.apply_gradients(grads)", "objective"),
        ("cost, grads = jax.value_and_grad(f)(batch)", "cost"),
        ("(cost, aux), grads = nnx.value_and_grad(f, has_aux=True)(batch)", "cost"),
        ("loss_value, grads = grad_fn(batch)", "loss_value"),
        ("train_loss = batch\nprint(train_loss)", "train_loss"),
        (TAPE.format(name="cost") + "loss = cost / 2", "loss"),
        (TAPE.format(name="cost") + "cost / 2", "cost / 2"),
    ],
)
def test_the_loss_is_reported_under_its_own_name(body: str, name: str) -> None:
    assert step(body).report == name


@pytest.mark.parametrize(
    "body",
    [
        "x = 'a\fb'\nlen(x) + batch",
        "x = 'a\u2028b'\nlen(x) + batch",
        "x = 'a\x1cb'  # \x85\nlen(x) + batch",
        "x = '''\n\u2028'''; y = 1\nlen(x) + y + batch",
        "\fx = 3\nx + batch",
        "if batch:\n    \f    x = 3\nx + batch",
        "x = 3\r\nx + batch\r\n",
        "x = '''\r\na\r\n'''\r\nlen(x) + batch",
        "x = 3\rx + batch",
    ],
)
def test_line_ends_are_those_of_python(body: str) -> None:
    program = compile_step(HEAD + body, given=("batch",), carries=True)
    assert call(program, 7, x=3) == (10, tuple(3 for _ in program.carried))


def test_carried_names_are_returned() -> None:
    program = step("a, b = b, a + batch\nloss = a")
    assert call(program, 5, a=1, b=2) == (2, (2, 6))


def test_errors_have_the_line_in_the_cell() -> None:
    program = step("x = 1\n\n# a comment\ny = '''\n\n'''\nloss = x / 0")
    with pytest.raises(ZeroDivisionError) as error:
        call(program, 0)
    assert error.traceback[-1].lineno + 1 == 8


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return batch", "line 2: `return`"),
        ("x = 1\nyield x", "line 3: `yield`"),
        ("loss = await f()", "line 2: `await`"),
        ("global w\nloss = w", "line 2: `global`"),
        ("from math import *\nloss = pi", "line 2: `from math import \\*`"),
        ("%time x = 1\nloss = 1", "line 2: IPython's `%time x = 1`"),
        ("!ls\nloss = 1", "line 2: IPython's `!ls`"),
        ("loss = batch\nloss, 3", "line 3: the cell ends with a tuple: report a scalar or a dict"),
        ("[batch,\n 1]", "line 2: the cell ends with a list: report a scalar or a dict"),
        ("{batch}", "line 2: the cell ends with a set: report a scalar or a dict"),
        ("loss = 1.0\n{}", "line 3: the dict is empty"),
        ("dict()", "line 2: the dict is empty"),
        ("sum = sum + batch.sum()\nloss = sum", "line 2: `sum` is a built-in until this line"),
        ("loss = max(1, batch)\nmax = 2", "line 3: `max` is a built-in until this line"),
        ("vars = [v + 1 for v in vars]\nloss = 1", "line 2: `vars` is a built-in"),
        ("loss = m.pi\nimport math as m", "line 2: `m` is read before the cell surely imports"),
        ("if batch:\n    def g(): pass\nloss = g()", "line 4: `g` is read before"),
        ("n = n + 1\ndel n\nloss = 1", "line 3: `del n`: the next step needs it"),
        ("del n\nloss = 1", "line 2: `del n`: an earlier cell created it"),
        ("loss = = 1", "line 2: invalid syntax"),
        ("a = 1\nm.fit(x, y)", "line 3: `m.fit` reads its own data: remove --data and --batch"),
        ("return 1\nglobal x\nloss = 1", "line 2: .*\nline 3: "),
    ],
)
def test_an_invalid_step_is_refused_with_its_line(body: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        step(body)


def test_a_fit_of_the_batch_is_a_step() -> None:
    assert step("loss = scaler.fit(batch).mean").reads == {"scaler": 2}


def test_a_nested_function_may_return_and_yield() -> None:
    assert call(step("def f():\n    yield batch\n    return\nloss = next(f())"), 3) == (3, ())


def test_the_mirrored_strategy_refuses_plain_carried_names() -> None:
    with pytest.raises(UsageError, match=r"line 2: `n` is read before.*tf.Variable"):
        step("n = n + 1\nloss = n", carries=False)


# Comparison with Python itself.

NAMES = st.sampled_from("abcd")
SIMPLE = st.one_of(
    NAMES,
    st.builds("({} + {})".format, NAMES, NAMES),
    st.builds("[{1} + {0} for {0} in [1, {1}]][0]".format, NAMES, NAMES),
    st.builds("(lambda {0}: {0} + {1})({1})".format, NAMES, NAMES),
    st.builds("({} := {})".format, NAMES, NAMES),
    st.builds("({} if {} > 1 else {})".format, NAMES, NAMES, NAMES),
)


def indent(text: str) -> str:
    return textwrap.indent(text, "    ")


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=3).map("\n".join).map(indent)
    return st.one_of(
        st.builds("if {} > 1:\n{}\nelse:\n{}".format, NAMES, body, body),
        st.builds("for {} in range(2):\n{}".format, NAMES, body),
        st.builds("try:\n{}\nexcept ValueError as {}:\n{}".format, body, NAMES, body),
        st.builds("try:\n{}\nfinally:\n{}".format, body, body),
        st.builds("while {} > 1:\n{}\n    break\nelse:\n{}".format, NAMES, body, body),
        st.builds("with nullcontext({}) as {}:\n{}".format, NAMES, NAMES, body),
        st.builds(
            "match {}:\n    case 1:\n{}\n    case {}:\n{}".format,
            NAMES,
            body.map(indent),
            st.one_of(NAMES, st.just("2"), st.just("_")),
            body.map(indent),
        ),
        st.builds(
            "for {} in 1, 2:\n    if {} > 1:\n        continue\n{}".format, NAMES, NAMES, body
        ),
        st.builds("def f({0}={1}):\n    return {0} + {2}\nf()".format, NAMES, NAMES, NAMES),
    )


STATEMENTS = st.recursive(
    st.one_of(
        st.builds("{} = {}".format, NAMES, SIMPLE),
        st.builds("{}, {} = {}, {}".format, NAMES, NAMES, SIMPLE, SIMPLE),
        st.builds("{} += {}".format, NAMES, SIMPLE),
        st.builds("{}, *_ = {}, {}".format, NAMES, SIMPLE, SIMPLE),
    ),
    blocks,
    max_leaves=8,
)


class Recording(dict[str, object]):
    """A namespace that records the names that are bound, and those that are read before."""

    def __init__(self) -> None:
        super().__init__(__builtins__=builtins, nullcontext=nullcontext)
        self.read: set[str] = set()
        self.bound: set[str] = set()

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        self.read.add(name)
        return 1

    def __setitem__(self, name: str, value: object) -> None:
        self.bound.add(name)
        super().__setitem__(name, value)


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join))
def test_the_analysis_covers_all_reads_and_bindings_of_python(source: str) -> None:
    names = Names()
    names.scan(ast.parse(source).body)
    ran = Recording()
    try:
        exec(compile(source, "<cell>", "exec"), ran)
    except NameError:  # Python deletes the name of a handler after it
        return
    assert ran.read <= names.read.keys()
    assert ran.bound <= names.bound.keys()


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join), NAMES)
def test_a_step_computes_the_same_values_as_the_cell(source: str, reported: str) -> None:
    source = f"{source}\n{{'is': {reported}}}"
    try:
        program = step(source)
    except UsageError:  # a carried name that is deleted
        return
    ran = Recording()
    exec(compile(source, "<cell>", "exec"), ran)
    given = dict.fromkeys({*program.reads, *program.carried}, 1)
    report, carried = call(program, None, **{**given, "nullcontext": nullcontext})
    assert report == {"is": ran[reported]}
    assert carried == tuple(ran[name] for name in program.carried)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.builds("{} = {}".format, NAMES, st.one_of(NAMES, st.just("1"))), min_size=1).map(
        "\n".join
    )
)
def test_the_analysis_is_exact_without_branches(source: str) -> None:
    names = Names()
    names.scan(ast.parse(source).body)
    ran = Recording()
    exec(compile(source, "<cell>", "exec"), ran)
    assert ran.read == set(names.read)
    assert ran.bound == names.bound.keys()
