"""Topology files: round trips, and errors that list every fault."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbdist.errors import PlanError
from nbdist.planner.hardware.lookup import EXAMPLE, find
from nbdist.planner.hardware.topology import parse
from nbdist.records import Chip, Level, Topology

if TYPE_CHECKING:
    from pathlib import Path

POSITIVE = st.floats(1e-9, 1e18)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
CHIPS = st.builds(
    Chip,
    name=NAMES,
    platform=NAMES,
    memory_bytes=st.integers(1, 2**45),
    flops=st.dictionaries(NAMES, POSITIVE, min_size=1, max_size=3),
    bytes_per_s=POSITIVE,
    source=NAMES,
)
LEVELS = st.builds(
    Level,
    name=NAMES,
    size=st.integers(1, 5000),
    latency_s=st.floats(0, 1),
    bytes_per_s=POSITIVE,
    ring=st.booleans(),
    wraps=st.booleans(),
    alone_bytes_per_s=st.none() | POSITIVE,
)
TOPOLOGIES = st.builds(
    Topology,
    chip=CHIPS,
    levels=st.lists(LEVELS, min_size=1, max_size=4).map(tuple),
    assumed=st.lists(NAMES, max_size=2).map(tuple),
)


@given(topology=TOPOLOGIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_encoded_record_is_parsed(topology: Topology, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_bytes(msgspec.json.encode(topology))
    assert parse(str(path)) == topology


@pytest.mark.parametrize("text", ["32xH100", "2 x v5e:8x16", "2 hosts x 4 V100, 10 Gbps", "NVL72"])
@pytest.mark.parametrize("kind", ["json", "toml"])
def test_saved_topology_of_a_name_is_parsed(text: str, kind: str, tmp_path: Path) -> None:
    topology = parse(text)
    path = tmp_path / f"my.{kind}"
    path.write_text(_toml(topology) if kind == "toml" else msgspec.json.encode(topology).decode())
    assert parse(f" {path} ") == topology


def _toml(topology: Topology) -> str:
    """Return the topology as TOML, with the chip by name."""
    lines = [f'chip = "{topology.chip.name}"', f"assumed = {json.dumps(topology.assumed)}"]
    for level in topology.levels:
        lines += ["[[levels]]"]
        for key, value in msgspec.structs.asdict(level).items():
            if value is not None:
                lines += [f"{key} = {json.dumps(value)}"]
    return "\n".join(lines)


def test_described_chip_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(EXAMPLE)
    topology = parse(str(path))
    assert topology.chip == Chip(
        name="MyChip",
        platform="gpu",
        memory_bytes=80 * 10**9,
        flops={"float32": 20e12, "bfloat16": 300e12},
        bytes_per_s=2e12,
        source="described in my.toml",
    )
    assert [(level.name, level.size) for level in topology.levels] == [("host", 8), ("network", 4)]


def test_path_in_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.toml").write_text(EXAMPLE)
    assert parse("~/my.toml").devices == 32


def faults_of(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as raised:
        parse(str(path))
    message = str(raised.value)
    head, _, rest = message.partition(" does not describe a topology:\n")
    assert head == str(path)
    faults, _, example = rest.partition("\nExample:\n")
    assert example == EXAMPLE
    return [line.strip() for line in faults.splitlines()]


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    text = """
        racks = 4
        [chip]
        name = ""
        memory_bytes = 80.5
        bytes_per_s = -1.0
        colour = "green"
        [chip.flops]
        bfloat16 = 0.0
        float32 = "fast"
        [[levels]]
        name = "host"
        size = 0
        latency_s = 0.0
        bytes_per_s = inf
        [[levels]]
        name = "network"
        size = 4
        latency_s = -1
        ring = "yes"
    """
    assert faults_of(tmp_path, text) == [
        ("chip.colour: unknown key; use name, platform, memory_bytes, flops, bytes_per_s, source"),
        "chip.name: is empty",
        "chip.platform: is missing",
        "chip.memory_bytes: expected `int`, got `float`",
        "chip.flops.bfloat16: is 0.0, and must be more than 0",
        "chip.flops.float32: expected `float`, got `str`",
        "chip.bytes_per_s: is -1.0, and must be more than 0",
        "levels[0].size: is 0, and must be more than 0",
        "levels[0].bytes_per_s: is inf, and must be more than 0",
        "levels[1].latency_s: is -1.0, and must be 0 or more",
        "levels[1].bytes_per_s: is missing",
        "levels[1].ring: expected `bool`, got `str`",
        "racks: unknown key; use chip and levels",
    ]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["chip: is missing", "levels: must be a list of at least one level, innermost first"]),
        (
            "chip = 5\nlevels = [5]",
            ["chip: is not a table", "levels[0]: is not a table"],
        ),
        (
            'chip = "H100"\nlevels = []',
            ["levels: must be a list of at least one level, innermost first"],
        ),
        (
            'chip = "H100"\n[[levels]]\nname = "host"\nsize = 8\nlatency_s = 0\nbytes_per_s = nan',
            ["levels[0].bytes_per_s: is nan, and must be more than 0"],
        ),
    ],
)
def test_faults_state_their_location(tmp_path: Path, text: str, faults: list[str]) -> None:
    assert faults_of(tmp_path, text) == faults


def test_empty_flops_and_zero_rates_are_refused(tmp_path: Path) -> None:
    text = EXAMPLE.replace("float32 = 20e12\nbfloat16 = 300e12\n", "")
    assert faults_of(tmp_path, text) == ["chip.flops: is empty"]
    text = EXAMPLE.replace("float32 = 20e12", "float32 = 0")
    assert faults_of(tmp_path, text) == ["chip.flops.float32: is 0.0, and must be more than 0"]


def test_unknown_chip_lists_nearest_names_first(tmp_path: Path) -> None:
    text = 'chip = "H10O"\n' + EXAMPLE[EXAMPLE.index("[[levels]]") :]
    (fault,) = faults_of(tmp_path, text)
    assert fault.startswith("chip: unknown hardware 'H10O': known are H100, ")
    assert find(fault.rpartition(", ")[2]) is not None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.toml", None, "{path} cannot be read: No such file or directory; give another path"),
        (
            "my.toml",
            b"chip = ",
            "{path} is not TOML: Invalid value (at end of document); correct that position",
        ),
        (
            "my.json",
            b'{"chip": }',
            "{path} is not JSON: Expecting value: line 1 column 10 (char 9); correct that position",
        ),
        (
            "my.json",
            b"[1]",
            "{path} has no table of chip and levels. Example:\n" + EXAMPLE,
        ),
    ],
)
def test_invalid_file_is_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=f"^{re.escape(message.format(path=path))}$"):
        parse(str(path))


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.JSON"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"my\.JSON is not JSON: .*codec.*; correct that position$"):
        parse(str(path))
