"""Equal operations of a program: each class has the prices of all its operations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nbdist.planner.cost.memory import memory_of
from nbdist.planner.cost.time import Cost
from nbdist.planner.graph.fusion import fused
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.optimizer_state import states_of
from nbdist.planner.graph.program import Program
from nbdist.planner.hardware.topology import extents
from nbdist.planner.search.search import layouts
from nbdist.planner.search.tensor_split import splittable
from nbdist.records import Planning
from tests.plan_models import hardware, model_of_program, transformer

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model

MACHINES = ("2 hosts x 8 A100-40GB, 100 Gbps", "v5e:4x4")


def model_with(layers: int) -> Model:
    return transformer(512, layers, 32, length=128, vocabulary=1024, heads=8)


def sharded_models(model: Model, on: str) -> list[ShardedModel]:
    """Return a model in all layouts that a search compares, and with each group alone sharded."""
    found = list(layouts(model, hardware(on), Planning()))
    for group, reason in splittable(model, 2).items():
        if not reason:
            one = Layout(8, 2, frozenset({group}), zero=1)
            found += [one, replace(one, zero=3, sequence=True)]
    return [ShardedModel(model, layout, states_of(model)) for layout in found]


@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize(
    "name", ["separate layers", "CNN", "transformer", "tied transformer", "LSTM", "recommender"]
)
def test_operations_of_a_class_have_the_same_prices(name: str, on: str) -> None:
    model = model_with(3) if name == "separate layers" else model_of_program(name)
    program, target = fused(model.ops, model.results), hardware(on)
    for sharded in sharded_models(model, on):
        cost = Cost(sharded, target, extents(sharded.layout.axes, target.topology))
        numbers, firsts = sharded.classes(program)
        for op, number in zip(program, numbers, strict=True):
            first = firsts[number]
            if op.kind == "loop":
                assert op is first
                continue
            assert cost.op_s(op) == cost.op_s(first)
            assert list(cost.reduced(op).items()) == list(cost.reduced(first).items())
            assert sharded.exchanged(op) == sharded.exchanged(first)
            for one, other in zip((*op.ins, *op.outs), (*first.ins, *first.outs), strict=True):
                assert sharded.on_tpus.bytes_of(one) == sharded.on_tpus.bytes_of(other)
                assert sharded.is_table_gradient(one) == sharded.is_table_gradient(other)
                assert sharded.is_sequence_sharded(one) == sharded.is_sequence_sharded(other)
                assert sharded.has_rows(one) == sharded.has_rows(other)


def test_more_equal_layers_add_no_classes() -> None:
    def counts(layers: int) -> list[int]:
        model = model_with(layers)
        program = fused(model.ops, model.results)
        found = layouts(model, hardware(MACHINES[0]), Planning())
        sharded = (ShardedModel(model, layout, states_of(model)) for layout in found)
        return [len(one.classes(program).firsts) for one in sharded]

    assert counts(4) == counts(8)


def test_the_peak_of_memory_is_that_of_the_operations_one_by_one() -> None:
    model = model_with(3)
    program = fused(model.ops, model.results)
    given = {tensor.value.number for tensor in model.tensors} | model.results
    last = {value.number: place for place, op in enumerate(program) for value in op.ins}
    for data in (1, 2, 4):
        sharded = ShardedModel(model, Layout(data, 1), states_of(model))
        held: dict[int, float] = {}
        peak = 0.0
        for place, op in enumerate(program):
            held |= {v.number: sharded.bytes_of(v) for v in op.outs if v.number not in given}
            peak = max(peak, sum(held.values()))
            ended = [n for n in held if last.get(n, place) == place]
            for number in ended:
                del held[number]
        found = memory_of(sharded, program, 2**34)
        assert found.gradients + found.activations == pytest.approx(peak, abs=2)


def test_products_of_a_value_with_itself_are_a_class_of_their_own() -> None:
    model = model_with(1)
    product = next(
        op for op in model.ops if op.kind == "dot" and op.ins[0].sizes == op.ins[1].sizes
    )
    same = type(product)(
        product.kind, product.name, (product.ins[0],) * 2, product.outs, product.summed
    )
    assert len(Program((product, same)).different.firsts) == 2
