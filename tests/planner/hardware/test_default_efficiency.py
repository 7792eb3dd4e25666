from __future__ import annotations

import msgspec
import pytest

from nbdist.planner.hardware.default_efficiency import calibration_of
from nbdist.planner.hardware.efficiency import PYTORCH_A100
from tests.planner.machines import A100, V5E


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("V100-32GB", 80),
        ("A100-40GB", 108),
        ("A100-80GB", 108),
        ("H100", 132),
        ("H200", 132),
        ("B200", 148),
        ("GB200", 148),
        ("TPU v4", 8),
        ("TPU v5e", 4),
        ("TPU v5p", 8),
        ("TPU v6e", 8),
    ],
)
def test_the_family_is_known_by_the_name(name, units) -> None:
    assert calibration_of(msgspec.structs.replace(A100, name=name)).units == units


def test_what_is_the_chips_own_does_not_depend_on_who_drives_it() -> None:
    compiled = calibration_of(A100)
    assert compiled.matmul_ceiling == PYTORCH_A100.matmul_ceiling
    assert compiled.link_efficiency == PYTORCH_A100.link_efficiency
    assert compiled.dispatch_s < PYTORCH_A100.dispatch_s


def test_a_tpu_is_not_taken_for_an_unknown_chip() -> None:
    unknown = msgspec.structs.replace(V5E, name="a chip of somebody's")
    assert calibration_of(unknown) != calibration_of(V5E)
    assert calibration_of(unknown).units == 1


@pytest.mark.parametrize("name", ["A100-80GB", "TPU v5e", "cpu"])
def test_efficiencies_are_shares(name) -> None:
    calibration = calibration_of(msgspec.structs.replace(A100, name=name))
    for share in (
        calibration.matmul_ceiling,
        calibration.unaligned,
        calibration.memory_efficiency,
        calibration.link_efficiency,
        calibration.network_efficiency,
    ):
        assert 0 < share <= 1
