"""View of plans: real ones of a small traced step, and unusual ones."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import jax
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.errors import UsageError
from nbdist.records import Plan, PlannedMemory, PlannedTensor, PlannedTime, Traffic
from nbdist.views import formatting
from nbdist.views.placement.tree import Branch, Leaf
from nbdist.views.plan import text as words
from nbdist.views.plan.names import NamesPicture
from nbdist.views.plan.picture import WIDTH, PlanPicture
from nbdist.views.plan.tensors import folded, placement_of, segments, written
from tests.plans import ASKED, HOSTILE, LAYERS, WIDE, by_hand, made, piped, tensor
from tests.views.placement.test_picture import Page

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
BAR = re.compile(r"  (\D+?) +[█▏]*  +(-?[\d,.]+) (\w+) +[<>-]?[\d.]+%")


def bars(lines: list[str], title: str) -> dict[str, tuple[float, float]]:
    """Return the figures below a title, each with its largest rounding error."""
    start = next(index for index, line in enumerate(lines) if line.startswith(title))
    found = {}
    for line in lines[start + 1 :]:
        match = BAR.match(line)
        if match is None:
            break
        number, unit = match[2].replace(",", ""), match[3]
        digits = len(number.partition(".")[2])
        if unit in SECONDS and float(number):  # three digits, without trailing zeros
            digits = 2 - math.floor(math.log10(abs(float(number))))
        scale = (SIZES | SECONDS)[unit]
        found[match[1]] = float(number) * scale, 0.51 * scale * 10.0**-digits
    return found


def assert_sum(parts: dict[str, tuple[float, float]], whole: float) -> None:
    assert sum(n for n, _ in parts.values()) == pytest.approx(
        whole, rel=1e-9, abs=sum(rounding for _, rounding in parts.values())
    )


def leaves(node: Branch) -> Iterator[Leaf]:
    for entry in node.entries:
        yield from leaves(entry) if isinstance(entry, Branch) else [entry]


# Properties of all plans.


@pytest.mark.parametrize("name", ASKED)
def test_figures_add_up(name: str) -> None:
    """Check the rounded figures of the text and the exact ones of its parts."""
    shown = made(name)
    lines = PlanPicture(shown).lines()
    assert_sum(bars(lines, "memory per device"), shown.memory.available)
    assert_sum(bars(lines, "time of a step"), shown.time.step)
    parts = words.memory_parts(shown)
    assert sum(part.amount for part in parts) == shown.memory.available
    assert sum(p.amount for p in parts if p.name in words.ROLES.values()) == shown.memory.arguments


@pytest.mark.parametrize("name", ASKED)
def test_memory_of_the_tree_equals_that_of_the_plan(name: str) -> None:
    shown = made(name)
    root = folded(shown, placement_of(shown))
    assert root.cost.stored == shown.memory.arguments * shown.devices
    assert sum(leaf.cost.stored for leaf in leaves(root)) == root.cost.stored
    assert sum(leaf.cost.arrays for leaf in leaves(root)) == len(shown.tensors)
    of_roles = {part.name: part.amount for part in words.memory_parts(shown)}
    for branch in root.entries:
        assert branch.cost.stored == of_roles[branch.label] * shown.devices


@pytest.mark.parametrize("name", ASKED)
def test_text_fits_its_width(name: str) -> None:
    assert max(map(len, PlanPicture(made(name)).lines())) <= WIDTH


@pytest.mark.parametrize("name", ASKED)
def test_the_page_is_complete_and_contains_no_scripts(name: str) -> None:
    page = PlanPicture(made(name)).html()
    parsed = Page(page)
    assert not parsed.open
    assert "script" not in parsed.counts
    assert HOSTILE in parsed.text
    assert "<script" not in page
    for fact in (words.headline(made(name)), *words.warnings(made(name)), *made(name).notes):
        assert fact in parsed.text


@pytest.mark.parametrize("name", ASKED)
def test_alternatives_are_shown_with_their_reason(name: str) -> None:
    text = " ".join(repr(PlanPicture(made(name))).split())
    page = Page(PlanPicture(made(name)).html()).text
    for other in made(name).runners_up:
        assert other.title in text
        assert other.why in page


# Words.


def test_the_headline_contains_the_main_figures() -> None:
    shown = made("both")
    assert words.headline(shown) == (
        "data 4 x tensor 2, ZeRO-1 on 8 x CPU: "
        f"about {formatting.duration(shown.time.step)} a step, "
        f"MFU {formatting.share(shown.time.mfu)}, {words.memory(shown)} on each device"
    )
    assert words.memory(shown).endswith(" MiB of 4.0 GiB")
    assert re.fullmatch(r"[\d.]+ of 79\.\d GiB", words.memory(by_gib(3, 79.1)))


def by_gib(taken: float, available: float) -> Plan:
    none = by_hand()
    memory = PlannedMemory(int(taken * 2**30), 0, 0, 0, int(available * 2**30))
    return msgspec.structs.replace(none, memory=memory)


def test_degrees_describe_the_sharding_of_each_axis() -> None:
    data, model = (text for _, _, text in words.degrees(made("both")))
    assert data.startswith("16 of 64 samples on each group of 2 devices; ")
    assert data.endswith("(ZeRO-1)")
    assert re.match(r"shards \d+ of 19 parameters, .+% of their bytes", model)
    assert [axis for axis, _, _ in words.degrees(made("sharded"))] == ["data"]
    assert "ZeRO-3" in words.degrees(made("sharded"))[0][2]
    assert words.degrees(made("one")) == [("none", "1", "one device contains all arrays")]


def test_stages_show_their_waiting_time() -> None:
    plan = piped(stage=4, data=2, micro=8)
    degrees = {axis: (size, text) for axis, size, text in words.degrees(plan)}
    assert list(degrees) == ["stage", "data", "microbatches"]
    assert degrees["stage"][0] == "4"
    assert re.match(
        r"2 layers of a scan per stage \(pipeline parallel\): stages wait \d+% of a step",
        degrees["stage"][1],
    )
    prefix = "parts of 4 samples go through the stages: "
    assert degrees["microbatches"][1].startswith(f"{prefix}all forward, then all backward")
    alternating = piped(schedule="1f1b", stage=4, data=2, micro=8)
    assert (
        words.degrees(alternating)[-1][2]
        == f"{prefix}each backward right after its forward pass (1F1B)"
    )
    assert "data 2 x 4 stages, 1F1B, 8 microbatches" in repr(PlanPicture(alternating))
    around = piped(stage=4, data=2, micro=8, rounds=2)
    (_, _, layers), _, (_, _, rows) = words.degrees(around)
    assert layers.startswith("2 layers of a scan per stage, in 2 blocks (pipeline parallel)")
    assert rows.startswith("parts of 4 samples go 2 times through the stages: all forward")
    assert next(iter(words.plan_lines(plan))).startswith(
        "layout data 2 x 4 stages, 8 microbatches: "
    )
    assert "data 2 x 4 stages, 8 microbatches on 8 x A100-40GB" in repr(PlanPicture(plan))
    assert "P(&#x27;stage&#x27;)" in PlanPicture(plan).html()


def test_selected_names_are_shown_alone() -> None:
    plan = piped(stage=4, data=2, micro=8)
    picture = NamesPicture(plan, ["moments", "x"])
    text, page = repr(picture), picture.html()
    assert text.startswith("moments, x in data 2 x 4 stages, 8 microbatches on 8 x A100-40GB: ")
    assert "alternatives" not in page
    for shown in (text, page):
        assert "params" not in shown
        assert "[&#x27;up&#x27;]" in shown or "['up']" in shown
    assert max(map(len, text.splitlines())) <= WIDTH
    with pytest.raises(
        UsageError, match=r"the plan contains no mom, y\.: it contains params, moments, x, y"
    ):
        NamesPicture(plan, ["mom", "y."])


def test_specs_are_written_as_python_code() -> None:
    specs = {
        "P()": ((), ()),
        "P('data')": (("data",), ()),
        "P(None, 'model')": ((), ("model",)),
        "P(('model', 'data'), None, 'x')": (("model", "data"), (), ("x",)),
    }
    for text, spec in specs.items():
        shown = spec[: max((dim + 1 for dim, axes in enumerate(spec) if axes), default=0)]
        assert written(spec) == text
        jax_text = str(jax.P(*(a[0] if len(a) == 1 else a or None for a in shown)))
        assert text == jax_text.replace(",)", ")")


def test_a_plan_that_does_not_fit_shows_the_excess() -> None:
    shown = by_hand(tensor("w", 1024, 1024), over=2**20)
    assert "it does not fit: 1.0 MiB too much on each device" in repr(PlanPicture(shown))
    assert "it does not fit" in Page(PlanPicture(shown).html()).text
    assert words.FREE not in [part.name for part in words.memory_parts(shown)]


def test_bars_contain_exposed_collectives_and_name_hidden_ones() -> None:
    time = PlannedTime(
        compute=1.0,
        exposed=0.25,
        traffic=(
            Traffic(axis="data", level="host", bytes=1e9, seconds=0.3, hidden=0.3),
            Traffic(axis="data", level="network", bytes=2e9, seconds=0.4, hidden=0.2),
            Traffic(axis="model", level="host", bytes=3e9, seconds=0.3, hidden=0.25),
            Traffic(axis="stage", level="rack", bytes=1e12, seconds=0.1, hidden=0.1),
        ),
        mfu=0.3,
    )
    shown = msgspec.structs.replace(by_hand(), time=time)
    parts = {part.name: part for part in words.time_parts(shown)}
    assert sum(part.amount for part in parts.values()) == pytest.approx(time.step)
    assert parts["host links"].detail == "3.7 GiB sent, 550 ms hidden"
    assert parts["rack links"].amount == 0
    lines = PlanPicture(shown).lines()
    assert_sum(bars(lines, "time of a step"), time.step)
    assert max(map(len, lines)) <= WIDTH
    assert f"  ({words.HIDDEN})" in lines
    assert words.HIDDEN in Page(PlanPicture(shown).html()).text
    seen = tuple(msgspec.structs.replace(one, hidden=0.0) for one in time.traffic)
    open_time = msgspec.structs.replace(time, traffic=seen, exposed=1.1)
    assert words.HIDDEN not in repr(PlanPicture(msgspec.structs.replace(shown, time=open_time)))


def test_figures_have_units_and_three_digits() -> None:
    shares = [formatting.share(p) for p in (0, 1e-5, 0.014, 0.13, 0.9912, 0.99999, 1)]
    assert shares == ["0%", "<0.1%", "1.4%", "13%", "99.1%", ">99.9%", "100%"]
    sizes = [formatting.size(n) for n in (0, 1023, 1024, 2**20 - 1, 79.1 * 2**30)]
    assert sizes == ["0 B", "1,023 B", "1.0 KiB", "1.0 MiB", "79.1 GiB"]


# The tree.


def test_equal_layers_are_grouped_and_moments_are_separate() -> None:
    text = repr(PlanPicture(made("both")))
    assert re.search(rf"\['layers'\]\[#\] x {LAYERS} +{3 * LAYERS} arrays", text)
    assert re.search(rf"\['up'\] x {LAYERS} +{WIDE} x {4 * WIDE} +float32", text)
    each = sum(t.device_bytes for t in made("both").tensors if re.match(r"params.*'up'", t.path))
    row = next(line for line in text.splitlines() if f"['up'] x {LAYERS}" in line)
    assert row.endswith(f" {formatting.size(each)}")


def test_layers_that_differ_keep_their_numbers() -> None:
    sizes = [16 if index % 2 else 8 for index in range(6)]
    shown = by_hand(*(tensor(f"p['blocks'][{i}]['w']", n, 4) for i, n in enumerate(sizes)))
    text = repr(PlanPicture(shown))
    assert "[1,3,5] x 3" in text
    assert "[0,2,4] x 3" in text
    assert "#" not in text


def test_numbers_in_names_of_two_arrays_are_not_layers() -> None:
    """`w1` and `w2` are two matrices. A list of arrays and many similar names are layers."""
    two = by_hand(tensor("p['w1']", 4, 4), tensor("p['w2']", 4, 4))
    assert all(f"['w{i}']" in repr(PlanPicture(two)) for i in (1, 2))
    assert "p[#] x 2" not in repr(PlanPicture(two))
    listed = by_hand(*(tensor(f"p[{i}]", 4, 4) for i in range(2)))
    assert "[#] x 2" in repr(PlanPicture(listed))
    named = by_hand(*(tensor(f"p['h_{i}_w']", 4, 4) for i in range(12)))
    assert "['h_#_w'] x 12" in repr(PlanPicture(named))


def test_equal_branches_are_grouped_by_their_names() -> None:
    shown = by_hand(
        *(tensor(f"s.{name}['{w}']", 4, n, role="state") for name in ("mu", "nu")
          for n, w in enumerate("ab", start=3))
    )  # fmt: skip
    text = repr(PlanPicture(shown))
    assert re.search(r"\.mu, \.nu +4 arrays", text)
    assert "['a'] x 2" in text


def test_the_largest_arrays_are_first() -> None:
    shown = by_hand(*(tensor(f"p['{name}']", n) for name, n in (("a", 3), ("b", 9), ("c", 6))))
    text = repr(PlanPicture(shown))
    assert text.index("['b']") < text.index("['c']") < text.index("['a']")


def test_a_long_list_counts_the_omitted_arrays() -> None:
    shown = by_hand(*(tensor(f"p['{'x' * n}']", n) for n in range(1, 1001)))
    lines = PlanPicture(shown).lines()
    rows = [line for line in lines if re.match(r" +\['x", line)]
    left = next(line for line in lines if "… and" in line)
    match = re.search(r"… and ([\d,]+) more arrays +([\d.]+) (\w+)$", left)
    assert match is not None
    assert len(rows) + int(match[1].replace(",", "")) == 1000
    hidden = sum(4 * n for n in range(1, 1001 - len(rows)))
    assert formatting.size(hidden) == f"{match[2]} {match[3]}"
    assert "more arrays" in Page(PlanPicture(shown).html()).text


# Blocks.


@pytest.mark.processes
def test_blocks_of_devices_equal_those_of_jax() -> None:
    """Compare every sharding of two dimensions over two axes."""
    code = """
    import itertools, jax
    jax.config.update("jax_num_cpu_devices", 6)
    from nbdist.records import PlannedTensor
    from nbdist.views.placement.text import block
    from nbdist.views.plan.tensors import placement_of
    from tests.plans import by_hand
    mesh = jax.make_mesh((2, 3), ("data", "model"))
    ways = [(), ("data",), ("model",), ("data", "model"), ("model", "data")]
    for spec in itertools.product(ways, ways):
        if not set(spec[0]) & set(spec[1]):
            made = by_hand(PlannedTensor("w", "parameter", (12, 18), "int8", spec, 1), model=3)
            placed = placement_of(made)
            array, layout = placed.arrays[0], placed.layouts[0]
            sharding = jax.NamedSharding(mesh, jax.P(*(way or None for way in spec)))
            indices = sharding.devices_indices_map((12, 18))
            for place, device in enumerate(mesh.devices.flat):
                spans = [s.indices(n)[:2] for s, n in zip(indices[device], (12, 18))]
                texts = ["all" if b - a == n else f"{a}:{b}" for (a, b), n in zip(spans, (12, 18))]
                ours = block(array, layout, layout.blocks[place])
                assert ours == f"rows {texts[0]}, cols {texts[1]}", (spec, place, ours, texts)
    print("compared")
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["compared"]


def test_the_text_shows_the_devices_of_each_block() -> None:
    lines = PlanPicture(by_hand(tensor("w", 8, 4, first="model"))).lines()
    start = lines.index("P('model'): w")
    assert lines[start + 1 : start + 4] == [
        "  dim 0 in 2 over model: 2 blocks, each on 2 devices",
        "    rows 0:4, cols all  devices 0,2",
        "    rows 4:8, cols all  devices 1,3",
    ]
    page = Page(PlanPicture(by_hand(tensor("w", 8, 4, first="model"))).html())
    assert "rows 0:4, cols all on devices 0,2" in page.tips


def test_a_plan_without_sharding_has_no_picture() -> None:
    page = PlanPicture(by_hand(tensor("w", 8, 4))).html()
    assert "blocks by device" not in page
    assert "blocks by device" in PlanPicture(by_hand(tensor("w", 8, 4, first="data"))).html()


def test_many_devices_make_a_small_page() -> None:
    shown = by_hand(tensor("w", 2**14, first="data"), data=2**12, model=16)
    page = PlanPicture(shown).html()
    assert len(page) < 20_000
    assert "dim 0 in 4096 over data" in Page(page).labels
    assert "4,096 blocks, each on 16 devices" in Page(page).text
    assert max(map(len, PlanPicture(shown).lines())) <= WIDTH


# Unusual plans.

AXES_OF_A_DIMENSION = st.sampled_from(
    [(), ("data",), ("model",), ("data", "model"), ("model", "data")]
)
PATHS = st.one_of(
    st.text("ab12#['\"].\\<&> é€", max_size=200),
    st.lists(
        st.sampled_from(["p", "['a']", "[0]", "[17]", ".b", "['x]y']", '["it\'s"]', "['<b>&']"]),
        max_size=9,
    ).map("".join),
)


@st.composite
def tensors(draw: st.DrawFn) -> PlannedTensor:
    spec = draw(st.lists(AXES_OF_A_DIMENSION, max_size=5))
    used: set[str] = set()
    for place, axes in enumerate(spec):
        spec[place] = axes if used.isdisjoint(axes) else ()
        used |= set(axes)
    return PlannedTensor(
        path=draw(PATHS),
        role=draw(st.sampled_from(sorted(words.ROLES))),
        shape=tuple(12 * draw(st.integers(0, 10**6)) for _ in spec),
        dtype=draw(st.sampled_from(["float32", "key<fry>", "float8_e4m3b11fnuz"])),
        spec=tuple(spec),
        device_bytes=draw(st.integers(0, 2**50)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_unusual_plans_are_shown_completely(
    given: list[PlannedTensor], data: int, model: int
) -> None:
    shown = by_hand(*given, data=data, model=model)
    picture = PlanPicture(shown)
    assert all(len(line) <= WIDTH for line in picture.lines())
    assert not Page(picture.html()).open
    root = folded(shown, placement_of(shown))
    assert sum(leaf.cost.arrays for leaf in leaves(root)) == len(given)
    assert root.cost.stored == shown.memory.arguments * shown.devices


@given(PATHS)
def test_a_path_consists_of_its_segments(path: str) -> None:
    assert "".join(segments(path)) == path


def test_segments_are_split_at_keys_and_attributes() -> None:
    assert segments("p['a.b'][3].kernel") == ("p", "['a.b']", "[3]", ".kernel")
    assert segments("""m["it's"]['x]y']""") == ("m", """["it's"]""", "['x]y']")


def test_a_notebook_gets_text_and_a_page() -> None:
    picture = PlanPicture(made("gpus"))
    assert picture._repr_mimebundle_() == {
        "text/html": picture.html(),
        "text/plain": repr(picture),
    }
