"""Overlap of collectives with operations: the rule, and plans on several platforms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.planner.cost.overlap import COMBINED_BYTES, Section
from nbdist.planner.hardware.topology import parse
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL
from tests import plans
from tests.plan_models import engines, hardware
from tests.plans import fixed

if TYPE_CHECKING:
    from nbdist.records import Chip

H100 = parse("8xH100").chip
V5E, V5P = parse("v5e:2x4").chip, parse("v5p:2x2x2").chip
CPU = msgspec.structs.replace(H100, platform="cpu")
PLUGIN = msgspec.structs.replace(H100, platform="plugin")


def section(
    *, work_s: float = 0.0, gradients_s: float = 0.0, activations_s: float = 0.0
) -> Section:
    made = Section()
    made.work_s, made.gradients_s, made.activations_s = work_s, gradients_s, activations_s
    return made


def with_gathers(seconds: float, *, work_s: float) -> Section:
    """Return a forward section with four large gathers."""
    made = section(work_s=work_s)
    for _ in range(4):
        made.gathers.add(seconds / 4, COMBINED_BYTES)
    return made


def test_gathers_with_enough_operations_are_hidden_except_the_first() -> None:
    assert with_gathers(4.0, work_s=10.0).hidden_s(H100) == (3.0, 0.0)
    assert with_gathers(4.0, work_s=2.0).hidden_s(H100) == (2.0, 0.0)
    assert with_gathers(4.0, work_s=0.0).hidden_s(H100) == (0.0, 0.0)


def test_small_gathers_are_combined_into_one_that_the_first_product_needs() -> None:
    made = section(work_s=10.0)
    for _ in range(4):
        made.gathers.add(1.0, COMBINED_BYTES / 8)
    assert made.hidden_s(H100) == (0.0, 0.0)


def test_sums_of_gradients_overlap_with_products_for_other_gradients() -> None:
    for gradients_s, hidden_s in ((10.0, 3.0), (1.0, 1.0), (0.0, 0.0)):
        made = section(work_s=20.0, gradients_s=gradients_s)
        for _ in range(4):
            made.sums.add(1.0, COMBINED_BYTES)
        assert made.hidden_s(H100) == (hidden_s, 0.0)


def test_sums_of_activations_are_exposed_without_products_for_gradients() -> None:
    """They are on the critical path of the forward pass."""
    assert section(work_s=10.0, activations_s=4.0).hidden_s(H100) == (0.0, 0.0)
    backward = section(work_s=10.0, gradients_s=3.0, activations_s=4.0)
    assert backward.hidden_s(H100) == (0.0, 3.0)


def test_an_operation_hides_one_collective() -> None:
    made = with_gathers(4.0, work_s=5.0)
    made.gradients_s, made.activations_s = 3.0, 3.0
    assert made.hidden_s(H100) == (2.0, 3.0)


def test_products_on_tpus_hide_their_own_collectives() -> None:
    """On v5p, gathers of the backward pass are synchronous."""
    for chip, gathers_s in ((V5E, 3.0), (V5P, 0.0)):
        assert with_gathers(4.0, work_s=10.0).hidden_s(chip) == (4.0, 0.0)
        backward = with_gathers(4.0, work_s=10.0)
        backward.gradients_s = 5.0
        backward.sums.add(2.0, 8.0)
        assert backward.hidden_s(chip) == (2.0 + gathers_s, 0.0)
        backward.sums.add(8.0, 8.0)
        assert backward.hidden_s(chip) == (5.0 + gathers_s, 0.0)


def test_tensor_parallel_layers_on_tpus_hide_nothing() -> None:
    made = with_gathers(4.0, work_s=10.0)
    made.gradients_s, made.activations_s = 5.0, 2.0
    assert made.hidden_s(V5P) == (0.0, 0.0)


@pytest.mark.parametrize("chip", [CPU, PLUGIN], ids=["cpu", "plugin"])
def test_nothing_is_hidden_without_asynchronous_collectives(chip: Chip) -> None:
    made = with_gathers(4.0, work_s=10.0)
    made.gradients_s, made.activations_s = 5.0, 2.0
    assert made.hidden_s(chip) == (0.0, 0.0)


LAYERS = plans.stacked(8, 8192, 16384)
"""Layers in a scan, so wide that each of their arrays is a message of its own."""

SMALL = plans.stacked()


def test_plan_with_zero_3_hides_gathers_behind_its_layers() -> None:
    (traffic,) = plan(LAYERS, hardware("8xH100"), fixed(data=8, zero=3)).time.traffic
    assert traffic.axis == DATA
    assert 0.2 * traffic.seconds < traffic.hidden < traffic.seconds


def test_plan_exposes_all_that_is_not_hidden() -> None:
    time = plan(LAYERS, hardware("8xH100"), fixed(data=2, model=4, zero=0)).time
    hidden = {traffic.axis: traffic.hidden for traffic in time.traffic}
    assert hidden[MODEL] > 0
    assert time.exposed == pytest.approx(sum(t.seconds - t.hidden for t in time.traffic))


def test_plan_for_cpus_hides_nothing() -> None:
    time = plan(SMALL, engines(4, 1), fixed(data=4, zero=3)).time
    assert time.traffic
    assert not any(traffic.hidden for traffic in time.traffic)
