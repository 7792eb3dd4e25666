"""Names that statements read, bind and delete, on all their paths."""

from __future__ import annotations

import ast

import pytest

from nbdist.cells.names import Names


def names_in(source: str, *known: str) -> Names:
    names = Names(known)
    names.scan(ast.parse(source).body)
    return names


def summary(source: str) -> tuple[str, str, str]:
    """Return the names that are read, bound on some path, and bound on every path."""
    names = names_in(source)
    sure = [name for name in names.bound if names.is_sure(name)]
    return " ".join(sorted(names.read)), " ".join(sorted(names.bound)), " ".join(sorted(sure))


@pytest.mark.parametrize(
    ("source", "read", "bound", "sure"),
    [
        ("", "", "", ""),
        ("a = b", "b", "a", "a"),
        ("a = a", "a", "a", "a"),
        ("a = 1\nb = a", "", "a b", "a b"),
        ("a, (b, *c) = d", "d", "a b c", "a b c"),
        ("a[i] = b.c", "a b i", "", ""),
        ("a += b", "a b", "a", "a"),
        ("a[0] += 1", "a", "", ""),
        ("a: b = c", "c", "a", "a"),
        ("a: b", "", "", ""),
        ("a.x: b = c", "a c", "", ""),
        ("a[0]: b", "a", "", ""),
        ("(a := b) + a", "b", "a", "a"),
        ("a + (a := b)", "a b", "a", "a"),
        ("import a.b, c as d\nfrom e import f, g as h", "", "a d f h", "a d f h"),
    ],
)
def test_assignments_and_imports(source: str, read: str, bound: str, sure: str) -> None:
    assert summary(source) == (read, bound, sure)


@pytest.mark.parametrize(
    ("source", "read", "sure"),
    [
        ("if c: a = 1\nelse: a = 2\na", "c", "a"),
        ("if c: a = 1\na", "a c", ""),
        ("if c: a = 1\nelse: raise e\na", "c e", "a"),
        ("if c: raise a\nelse: raise b", "a b c", ""),
        ("if c: a = 1\nelse: sys.exit()\na", "c sys", "a"),
        ("if c: a = 1\nelse: exit()\na", "a c exit", ""),
        ("(a := 1) if c else (a := 2)\na", "c", "a"),
        ("(a := 1) if c else 0\na", "a c", ""),
        ("(a := c) and (b := 1)\na, b", "b c", "a"),
        ("x < (a := c) < (b := 1)\na, b", "b c x", "a"),
        ("assert c, (a := 1)\na", "a c", ""),
        ("assert (a := c)\na", "c", "a"),
        ("for i in r: a = i\na, i", "a i r", ""),
        ("for i in range(2): a = i\na, i", "range", "a i"),
        ("for i in range(1, 3): a = i\na", "range", "a i"),
        ("for i in range(0): a = i\na", "a range", ""),
        ("for i in range(3, 1): a = i\na", "a range", ""),
        ("for i in range(n): a = i\na", "a n range", ""),
        ("for i in range(0, 4, 2): a = i\na", "a range", ""),
        ("for i in (1, *x): a = i\na", "x", "a i"),
        ("for i in [*x]: a = i\na", "a x", ""),
        ("for i in (): a = i\na", "a", ""),
        ("for i in range(2):\n if c: break\n a = i\na", "a c range", ""),
        ("for i in range(2):\n if c: continue\n a = i\na", "a c range", ""),
        ("for i in range(2):\n for j in (1,): break\n a = i\na", "range", "a i"),
        ("for i in range(2):\n for j in (1,): pass\n else: break\n a = i\na", "a range", ""),
        ("for i in range(2):\n def f():\n  while 1: break\n a = i\na", "range", "a f i"),
        ("for i in x: pass\nelse: a = 1\na", "x", "a"),
        ("for i in x: break\nelse: a = 1\na", "a x", ""),
        ("while (a := c): b = 1\na, b", "b c", "a"),
        ("while c: pass\nelse: a = 1\na", "a c", ""),
        ("with m as a: b = a\na, b", "m", "a b"),
        ("if c:\n with m: raise e\nelse: a = 1\na", "a c e m", ""),
    ],
)
def test_paths(source: str, read: str, sure: str) -> None:
    found = summary(source)
    assert (found[0], found[2]) == (read, sure)


@pytest.mark.parametrize(
    ("source", "read", "sure"),
    [
        ("try: a = 1\nexcept E: a = 2\na", "E", "a"),
        ("try: a = 1\nexcept E: pass\na", "E a", ""),
        ("try: a = 1\nexcept E: raise\na", "E", "a"),
        ("try: a = 1\nexcept E: a\na", "E a", ""),
        ("try: pass\nexcept E: raise\nelse: a = 1\na", "E", "a"),
        ("try: a = 1\nfinally: a", "a", "a"),
        ("try: pass\nfinally: a = 1\na", "", "a"),
        ("a = 1\ntry: del a\nexcept E: a", "E a", ""),
        ("a = 1\ntry: pass\nexcept E: del a\nfinally: a", "E a", ""),
        ("a = 1\ntry: pass\nexcept E:\n del a\n raise\nfinally: a", "E a", "a"),
        ("a = b = 1\ntry:\n del b\n try: c\n except E as a: d\nexcept F: a", "E F a c d", ""),
        ("try: pass\nexcept E as a: a\na", "E a", ""),
        ("a = 1\ntry: pass\nexcept E as a: pass\na", "E a", ""),
        ("try: pass\nexcept* E: a = 1\na", "E a", ""),
        ("if c:\n try: raise e\n finally: pass\nelse: a = 1\na", "c e", "a"),
        ("if c:\n try: pass\n finally: raise e\nelse: a = 1\na", "c e", "a"),
    ],
)
def test_exceptions(source: str, read: str, sure: str) -> None:
    found = summary(source)
    assert (found[0], found[2]) == (read, sure)


@pytest.mark.parametrize(
    ("source", "read", "sure"),
    [
        ("match x:\n case 1: a = 1\n case _: a = 2\na", "x", "a"),
        ("match x:\n case 1: a = 1\n case b: a = b\na", "x", "a"),
        ("match x:\n case 1: a = 1\na", "a x", ""),
        ("match x:\n case 1: a = 1\n case _ if c: a = 2\na", "a c x", ""),
        ("match x:\n case [a, *b]: a, b\n case _: pass", "x", ""),
        ("match x:\n case {'k': a, **b}: a, b", "x", ""),
        ("match x:\n case C(y=a) as b: a, b", "C x", ""),
        ("match x:\n case [1, *_]: pass", "x", ""),
        ("match x:\n case a if a > b: a", "b x", ""),
    ],
)
def test_patterns(source: str, read: str, sure: str) -> None:
    found = summary(source)
    assert (found[0], found[2]) == (read, sure)


@pytest.mark.parametrize(
    ("source", "read", "early", "bound"),
    [
        ("def f(a, b=c): return a + d", "c d", "c", "f"),
        ("def f(): a = 1; return a + b", "b", "", "f"),
        ("def f(): return f()", "", "", "f"),
        ("@d\ndef f(a: t, /, *v: u, k: w = x, **kw: y) -> z: pass", "d t u w x y z", "*", "f"),
        ("async def f(): await a", "a", "", "f"),
        ("lambda a, b=c: a + d", "c d", "c", ""),
        ("@d\nclass C(b, metaclass=m): x = y", "b d m y", "*", "C"),
        ("class C:\n a = a\n def f(self): return e", "a e", "a", "C"),
        ("class C: x = C", "C", "*", "C"),
        ("[a + c for a in b if d]", "b c d", "*", ""),
        ("[a for a in a]", "a", "*", ""),
        ("[f(b) for a in x for b in a if b if c]", "c f x", "*", ""),
        ("{k: v for k, v in x}", "x", "*", ""),
        ("{a for a in x}, (b for b in y)", "x y", "*", ""),
        ("[lambda: z for a in x]", "x z", "x", ""),
        ("[(w := a) for a in x]", "x", "*", "w"),
    ],
)
def test_scopes(source: str, read: str, early: str, bound: str) -> None:
    """Names in `early` are read at once: `*` stands for all."""
    names = names_in(source)
    assert " ".join(sorted(names.read)) == read
    assert " ".join(sorted(names.early)) == (read if early == "*" else early)
    assert " ".join(sorted(names.bound)) == bound


def test_a_walrus_in_a_comprehension_may_not_run() -> None:
    names = names_in("[(w := a) for a in x]\nw")
    assert not names.is_sure("w")
    assert "w" in names.read
    assert names.assigned == {"w"}


def test_lines_are_those_of_the_first_use() -> None:
    names = names_in("\nb = a\nb = a\ndel b\ndef g(): pass\nimport m")
    assert names.read == {"a": 2}
    assert names.bound == {"b": 2, "g": 5, "m": 6}
    assert names.deleted == {"b": 4}


def test_only_assignments_assign() -> None:
    source = "a = 1\ndef f(): pass\nclass C: pass\nimport m\nfor i in x: pass\nwith x as w: pass"
    assert names_in(source).assigned == {"a", "i", "w"}
    assert names_in("try: pass\nexcept E as e: pass").assigned == {"e"}


def test_a_deleted_name_is_no_longer_sure() -> None:
    names = names_in("a = 1\ndel a\na")
    assert not names.is_sure("a")
    assert names.read == {"a": 3}
    assert names_in("del b").read == {"b": 1}


def test_known_names_are_not_read() -> None:
    names = names_in("batch + x", "batch")
    assert names.read == {"x": 1}
    assert names.is_sure("batch")
    assert names.bound == {}
