"""Decisions: calls without a choice, stored choices, trials, and inputs that a call donates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from nbdist.parallel.autoplace import decision
from nbdist.parallel.autoplace.cache import Choices
from nbdist.parallel.autoplace.candidates import AS_CALLED, ONE_DEVICE
from nbdist.parallel.autoplace.decision import Call, decide
from nbdist.parallel.autoplace.signatures import Statics
from nbdist.parallel.autoplace.trials import Choice, Contender, Verdict
from nbdist.records.autoplace import DEFAULT, LeftOut, Timed
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import nbdist

TIMED = (Timed(name=ONE_DEVICE, words="", median_s=1.0, spread_s=0.0, rounds=5),)


class Trials:
    """Double of the trials, which choose one name without a measurement.

    Attributes:
        names: candidates of each trial.
        contenders: those of the last trial.
    """

    def __init__(self, choice: str) -> None:
        self.names: list[list[str]] = []
        self.contenders: Sequence[Contender] = ()
        self._choice = choice

    def __call__(self, contenders: Sequence[Contender], most: Callable[..., Any]) -> Verdict:
        self.names.append([contender.name for contender in contenders])
        self.contenders = contenders
        left_out = (LeftOut(name="slow", why="it failed"),)
        return Verdict(Choice(self._choice, "it is fastest"), TIMED, left_out)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials(ONE_DEVICE)
    monkeypatch.setattr(decision, "tried", found)
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Choices:
    return Choices(tmp_path / "choices.sqlite")


def call(
    function: Callable[..., Any], *args: Any, is_fixed: bool = False, donated: tuple[int, ...] = ()
) -> Call:
    jitted = jax.jit(function, donate_argnums=donated)
    given = Statics((), ()).given(args, {})
    return Call("work", jitted, jitted.trace(*args), given, is_fixed)


def spread() -> jax.Array:
    """Return an array over all devices, so that one device is another place."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(np.ones((8, 4), np.float32), jax.NamedSharding(mesh, jax.P("data")))


def test_trials_choose_a_candidate(trials: Trials, kept: Choices) -> None:
    made = decide(call(jnp.tanh, spread()), kept)
    assert trials.names[0][0] == DEFAULT
    assert ONE_DEVICE in trials.names[0]
    assert made.candidate.name == made.decision.chosen == ONE_DEVICE
    found = made.decision
    assert (found.function, found.why, found.timed) == ("work", "it is fastest", TIMED)
    assert found.left_out[-1].name == "slow"
    assert found.inputs.startswith("float32[8,4]")
    assert kept.get(found.fingerprint) == found


def test_stored_decision_is_reused(trials: Trials, kept: Choices) -> None:
    one = call(jnp.tanh, spread())
    first = decide(one, kept).decision
    assert decide(one, kept).decision == first
    assert len(trials.names) == 1
    decide(call(jnp.sinh, spread()), kept)
    assert len(trials.names) == 2


def test_stored_name_that_is_no_candidate_is_tried_again(trials: Trials, kept: Choices) -> None:
    one = call(jnp.tanh, spread())
    first = decide(one, kept).decision
    kept.put(msgspec.structs.replace(first, chosen="a platform that is gone"))
    assert decide(one, kept).decision.chosen == ONE_DEVICE
    assert len(trials.names) == 2
    kept.put(msgspec.structs.replace(first, chosen=DEFAULT))
    assert decide(one, kept).candidate.name == DEFAULT
    assert len(trials.names) == 2


def test_decision_that_another_process_lacks_is_not_reused(
    trials: Trials, kept: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = call(jnp.tanh, spread())
    decide(one, kept)
    for own, expected in ((lambda figures: figures, 1), (lambda f: np.maximum(f, [-1, 1]), 2)):
        monkeypatch.setattr(decision, "alone", own)
        decide(one, kept)
        assert len(trials.names) == expected


def printing(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    return x


@pytest.mark.parametrize(
    ("function", "is_fixed", "why"),
    [
        (printing, False, "it has effects (DebugEffect), which trials would repeat"),
        (jnp.tanh, True, "it was jitted with shardings or a device of its own"),
        (printing, True, "it has effects (DebugEffect), which trials would repeat"),
    ],
)
def test_call_without_choice_is_not_tried(
    trials: Trials, kept: Choices, function: Any, is_fixed: bool, why: str
) -> None:
    made = decide(call(function, spread(), is_fixed=is_fixed), kept)
    assert made.candidate is AS_CALLED
    assert (made.decision.chosen, made.decision.why) == (DEFAULT, why)
    assert (made.decision.fingerprint, made.decision.left_out) == ("", ())
    assert not trials.names
    assert not kept.path.exists()


def test_single_candidate_is_not_tried(trials: Trials, kept: Choices) -> None:
    """A scalar on one device cannot be sharded."""
    one = jax.device_put(np.float32(1), jax.devices()[0])
    made = decide(call(jnp.tanh, one), kept)
    assert made.decision.why == "there is no other place"
    assert made.decision.left_out
    assert not trials.names


def test_donated_inputs_are_copied(trials: Trials, kept: Choices) -> None:
    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    x, y = spread(), spread()
    decide(call(add, x, y, donated=(0,)), kept)
    default, *_ = trials.contenders
    copy, same = default.prepare()
    assert copy is not x
    assert same is y
    assert not default.call([copy, same]).is_deleted()
    assert not x.is_deleted()


def test_candidate_moves_its_inputs(trials: Trials, kept: Choices) -> None:
    decide(call(jnp.tanh, spread()), kept)
    (one,) = [each for each in trials.contenders if each.name == ONE_DEVICE]
    assert len(one.call(one.prepare()).sharding.device_set) == 1
    default = trials.contenders[0]
    assert len(default.call(default.prepare()).sharding.device_set) == 8


SETUP = """
import concurrent.futures, os
import jax, jax.numpy as jnp, numpy as np
from nbdist.parallel.autoplace import cache as choices
from nbdist.parallel.autoplace.decorator import autoplace

os.environ["NBDIST_PLACEMENTS"] = FOLDER + f"/{rank}.sqlite"
choices.users.cache_clear()

def whole(*shape):
    ones = np.ones(shape, "float32")
    place = jax.NamedSharding(mesh, jax.P())
    return jax.make_array_from_callback(shape, place, lambda index: ones[index])

def work(x):
    return jax.lax.fori_loop(0, 10, lambda _, y: jnp.sort(y + 1, axis=1), x)

def told(function):
    return [(d.chosen, d.made, [t.name for t in d.timed], [t.median_s for t in d.timed])
            for d in function.report().decisions]
"""


SHARED = """
shared = autoplace(work)
x = whole(128, 512)
out = shared(x)
ok = all((np.asarray(shard.data) == 11).all() for shard in out.addressable_shards)
"""


AGAIN = """
again = autoplace(work)
out = again(x)
"""


LOCAL = """
own = autoplace(lambda w, x: jnp.tanh(x @ w))

def call():
    device = jax.local_devices()[1]
    return own(jax.device_put(np.ones((8, 4), "float32"), device), np.ones((16, 8), "float32"))

with concurrent.futures.ThreadPoolExecutor(1) as pool:  # without the mesh of the cell
    out = pool.submit(call).result()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Cluster]:
    folder = tmp_path_factory.mktemp("kept")
    with clusters.cluster(hosts=4, devices_per_host=2, framework="jax") as running:
        running.run(f"FOLDER = {str(folder)!r}\n{SETUP}", strategy="pjrt")
        yield running


def values(cluster: nbdist.Cluster, expression: str) -> list[str]:
    results = cluster.run(expression, strategy="pjrt").results
    return [results[rank] for rank in range(4)]


def test_all_processes_choose_the_same_for_shared_arrays(cluster: nbdist.Cluster) -> None:
    cluster.run(SHARED, strategy="pjrt")
    assert values(cluster, "ok") == ["True"] * 4
    chosen = values(cluster, "[(c, n, m) for c, _, n, m in told(shared)]")
    assert len(set(chosen)) == 1  # the times are equal too: they are those of the slowest process
    assert "batch" in chosen[0]
    assert "one device" not in chosen[0]


@pytest.mark.full
def test_common_decisions_are_reused_and_lost_ones_made_again(
    cluster: nbdist.Cluster,
) -> None:
    cluster.run(SHARED, strategy="pjrt")
    cluster.run(AGAIN, strategy="pjrt")
    assert values(cluster, "told(again) == told(shared)") == ["True"] * 4
    lose = "if rank == 2:\n    os.remove(choices.users().path)\n"
    cluster.run(lose + AGAIN, strategy="pjrt")
    assert values(cluster, "told(again)[0][1] > told(shared)[0][1]") == ["True"] * 4
    assert len(set(values(cluster, "told(again)[0][0]"))) == 1


def test_each_process_decides_for_its_local_arrays(cluster: nbdist.Cluster) -> None:
    cluster.run(LOCAL, strategy="pjrt")
    local = "out.sharding.is_fully_addressable and bool((abs(np.asarray(out) - 1) < 0.01).all())"
    assert values(cluster, local) == ["True"] * 4
    assert all("batch" in names for names in values(cluster, "told(own)[0][2]"))
    assert (
        values(cluster, "own.report().decisions[0].inputs")
        == ["'float32[8,4] on cpu 1, float32[16,8] from the host'"] * 4
    )
