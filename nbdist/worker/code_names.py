"""Global names that the code of a function uses."""

from __future__ import annotations

import dis
from types import CodeType

_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def globals_of(code: CodeType) -> set[str]:
    """Names that the code, or a function in it, reads from its globals."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in _READS}
    nested = (part for part in code.co_consts if isinstance(part, CodeType))
    return own.union(*map(globals_of, nested))


def words_of(code: CodeType) -> set[str]:
    """All names in the code, or in a function in it: of globals and of attributes."""
    nested = (part for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names}.union(*map(words_of, nested))
