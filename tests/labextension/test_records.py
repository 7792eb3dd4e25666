"""TypeScript definitions of the records, generated from the Python records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nbdist import records

if TYPE_CHECKING:
    from types import ModuleType

GENERATOR = Path(__file__).parents[2] / "tools" / "generate_records.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_records", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_records_ts_is_not_stale(generator: ModuleType) -> None:
    assert generator.TARGET.read_text() == generator.source(), f"run: python tools/{GENERATOR.name}"


def test_every_field_of_a_run_is_in_the_definitions(generator: ModuleType) -> None:
    block = generator.source().split("export interface IRunState {")[1].split("}\n")[0]
    fields = [line.split(":")[0].removeprefix("  readonly ") for line in block.splitlines() if line]
    assert fields == list(records.RunState.__struct_encode_fields__)


def test_messages_have_their_tag_in_the_definitions(generator: ModuleType) -> None:
    assert records.StopRun.__struct_config__.tag == "StopRun"
    assert "readonly type: 'StopRun';" in generator.source()
    messages = "IStateMessage | ITableMessage | IMediaMessage | ITextMessage | IStackMessage"
    assert f"export type ServerMessage =\n  {messages} | ICaughtUp;" in generator.source()


def test_an_unsupported_type_is_refused(generator: ModuleType) -> None:
    with pytest.raises(TypeError, match="no TypeScript for"):
        generator.typescript(generator.types.DecimalType())
