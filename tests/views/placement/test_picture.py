"""View of placements, from made-up ones."""

from __future__ import annotations

import re
import struct
from html.parser import HTMLParser

import msgspec

from nbdist.records import HOST_MEMORY, Layout, MeshShape, PlacedArray, PlacedDevice, Placement
from nbdist.views.placement import text as words
from nbdist.views.placement.picture import SHOWN_ROWS, PlacementPicture
from nbdist.views.placement.tree import Leaf, cost, on_devices, rows, tree
from tests.placements import layers

DEVICES = tuple(PlacedDevice(rank, f"gpu:{gpu}") for rank in range(3) for gpu in range(2))
MESH = MeshShape(axes=("data", "model"), sizes=(3, 2), devices=tuple(range(6)))
ALL = tuple(range(6))
REPLICATED = Layout(kind="replicated", devices=ALL, blocks=(0,) * 6, spec="P()", mesh=0)
ROWS = Layout(
    kind="sharded",
    devices=ALL,
    blocks=(0, 0, 1, 1, 2, 2),
    parts=(3, 1),
    axes=(("data",), ()),
    spec="P('data', None)",
    mesh=0,
)
CUBE = Layout(
    kind="sharded",
    devices=ALL,
    blocks=ALL,
    parts=(3, 1, 2),
    axes=(("data",), (), ("model",)),
    spec="P('data', None, 'model')",
    mesh=0,
)
GONE = Layout(kind="deleted")
HOST = Layout(kind="host", devices=(6,), blocks=(0,))
LAYOUTS = (REPLICATED, ROWS, CUBE, GONE, HOST)


def array(layout: Layout, *shape: int, path: tuple[str, ...] = ("x",)) -> PlacedArray:
    size = 4
    for length in shape:
        size *= length
    return PlacedArray(path, shape, "float32", size, LAYOUTS.index(layout))


def placement(*arrays: PlacedArray, notes: tuple[str, ...] = ()) -> Placement:
    return Placement(
        names=tuple(dict.fromkeys(a.path[0] for a in arrays)),
        hosts=dict.fromkeys(range(3), "h<1>"),
        devices=(*DEVICES, PlacedDevice(0, HOST_MEMORY)),
        meshes=(MESH,),
        layouts=LAYOUTS,
        arrays=arrays,
        notes=notes,
    )


def many(count: int) -> PlacementPicture:
    return PlacementPicture(
        placement(
            *(array(ROWS, 6, 4, path=("p", f"['layer{i // 4}']", f".w{i}")) for i in range(count))
        )
    )


class Page(HTMLParser):
    """Parser that records open tags, text, tool tips and labels of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tips: list[str] = []
        self.labels: list[str] = []
        self.text = ""
        self.counts: dict[str, int] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag != "br":
            self.open.append(tag)
        given = dict(attrs)
        self.tips += [given["title"] or ""] if "title" in given else []
        self.labels += [given["aria-label"] or ""] if "aria-label" in given else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


# Sums.


def test_a_divisible_replicated_array_could_be_sharded() -> None:
    took = cost(array(REPLICATED, 5, 12), REPLICATED)
    assert (took.once, took.stored, took.copies, took.shardable) == (240, 1440, 1200, 1200)
    assert words.advice(array(REPLICATED, 5, 12), REPLICATED, took) == "1.2 KiB, dim 1"


def test_an_indivisible_replicated_array_cannot_be_sharded() -> None:
    for shape in ((5, 7), (), (0, 6)):
        assert cost(array(REPLICATED, *shape), REPLICATED).shardable == 0


def test_an_array_sharded_over_one_axis_could_use_the_other() -> None:
    took = cost(array(ROWS, 3, 4), ROWS)
    assert (took.once, took.stored, took.shardable) == (48, 96, 48)
    assert words.advice(array(ROWS, 3, 4), ROWS, took).endswith("dim 1")
    assert cost(array(ROWS, 3, 5), ROWS).shardable == 0


def test_a_deleted_array_uses_no_memory() -> None:
    assert cost(array(GONE, 6), GONE) == cost(array(GONE, 6000), GONE)
    text = repr(PlacementPicture(placement(array(GONE, 6))))
    assert "deleted" in text
    assert "1 array, 0 B" in text


def test_memory_is_added_up_by_device() -> None:
    made = placement(array(ROWS, 3, 4), array(CUBE, 3, 1, 2), array(HOST, 5))
    assert on_devices(made) == {**dict.fromkeys(ALL, 16 + 4), 6: 20}
    facts = list(words.facts(made, tree(made).cost))
    assert facts[:2] == ["20 B on each of 6 devices", "20 B on 1 host memory"]


# Words.


def test_slices_are_written_by_dimension() -> None:
    assert words.block(array(ROWS, 6, 4), ROWS, 2) == "rows 4:6, cols all"
    assert words.block(array(CUBE, 6, 4, 8), CUBE, 5) == "[4:6, :, 4:8]"
    line = msgspec.structs.replace(ROWS, parts=(3,), axes=(("data",),))
    assert words.block(array(ROWS, 6), line, 1) == "2:4"
    assert words.block(array(REPLICATED, 6, 4), REPLICATED, 0) == "rows all, cols all"
    assert words.block(array(REPLICATED), REPLICATED, 0) == "all"


def test_a_mesh_shows_which_axes_cross_ranks() -> None:
    made = placement(array(ROWS, 3, 4))
    text = words.mesh_words(made, MESH)
    assert text == "mesh data 3 x model 2: data crosses ranks, model stays on a rank"
    turned = msgspec.structs.replace(MESH, devices=(0, 2, 4, 1, 3, 5))
    assert "model crosses ranks" in words.mesh_words(made, turned)


def test_devices_of_equal_ranks_are_grouped() -> None:
    made = placement(array(ROWS, 3, 4))
    assert words.devices(made, ALL) == "0-2@h<1> gpu:0, gpu:1"
    assert words.devices(made, (0, 3)) == "0@h<1> gpu:0, 1@h<1> gpu:1"


# Text.


def test_the_text_shows_blocks_and_their_devices() -> None:
    lines = PlacementPicture(placement(array(CUBE, 6, 4, 8, path=("p", "['w']")))).lines()
    assert lines[0] == "p: 1 array, 768 B"
    assert "  2@h<1> gpu:1  [4:6, :, 4:8]" in lines
    assert any("dim 0 in 3 over data, dim 2 in 2 over model" in line for line in lines)
    assert lines[-1].split()[:4] == ["['w']", "6", "x", "4"]


def test_a_long_tree_is_truncated_and_counts_the_rest() -> None:
    text = many(4000).lines()
    below = next(i for i, line in enumerate(text) if line.startswith("array "))
    assert len(text) - below - 2 <= SHOWN_ROWS
    rest = re.search(r"… and ([\d,]+) more arrays, ", "\n".join(text))
    assert rest is not None
    shown = sum(int(n) for n in re.findall(r"\] +(\d+) arrays", "\n".join(text)))
    assert shown + int(rest[1].replace(",", "")) == 4000


def test_a_flat_tree_is_truncated_too() -> None:
    made = placement(*(array(ROWS, 6, 4, path=("p", f"[{i}]")) for i in range(1000)))
    shown = rows(tree(made), 20)
    assert len(shown) <= 20
    assert shown[-1].hidden.arrays + sum(isinstance(row.entry, Leaf) for row in shown) == 1000


def test_first_branches_are_opened_before_later_ones() -> None:
    made = many(48).placement
    shown = rows(tree(made), 20)
    assert len(shown) <= 20
    assert [row.depth for row in shown[:6]] == [0, 1, 2, 2, 2, 2]
    assert all(row.depth == 1 for row in shown[-3:])


def test_large_branches_share_the_rows() -> None:
    made = placement(
        *(array(ROWS, 6, 4, path=(name, f"[{i}]")) for name in ("p", "q") for i in range(500))
    )
    shown = [row for row in rows(tree(made), 20) if row.entry is None]
    assert len(shown) == 2


def test_a_long_path_is_shortened() -> None:
    picture = PlacementPicture(placement(array(ROWS, 6, 4, path=("p", "[0]" * 1000, ".w"))))
    assert max(map(len, picture.lines())) < 200
    assert "p[0][0]" in picture.html()
    assert "…" in picture.html()
    assert len(picture.html()) < 10_000


def test_branches_of_one_branch_are_joined() -> None:
    made = placement(
        array(ROWS, 6, 4, path=("p", "[0]", ".mu", "['w']")),
        array(ROWS, 6, 4, path=("p", "[0]", ".mu", "['b']")),
    )
    assert [entry.label for entry in tree(made).entries] == ["p[0].mu"]


# HTML and the picture.


def test_the_page_is_well_formed_and_folds() -> None:
    page = Page(many(40).html())
    assert page.open == []
    assert page.counts["details"] == page.counts["summary"] == 11
    assert "P('data', None)" in page.text


def test_tool_tips_show_the_slice() -> None:
    page = Page(PlacementPicture(placement(array(ROWS, 6, 4))).html())
    assert "rows 0:2, cols all on 0@h<1> gpu:0, gpu:1" in page.tips
    assert "dim 0 in 3 over data; on 6 devices" in page.labels


def test_the_first_two_sharded_dimensions_are_drawn() -> None:
    page = PlacementPicture(placement(array(CUBE, 6, 4, 8))).html()
    picture = re.search(r'<span class="nbd-p".*?</span>', page)
    assert picture is not None
    lines = picture[0].split("<br>")
    assert [re.findall(r">(\d)</b>", line) for line in lines] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]


def test_a_picture_has_a_limited_number_of_blocks() -> None:
    wide = Layout(kind="sharded", devices=(0,) * 4096, blocks=tuple(range(4096)), parts=(64, 64))
    made = msgspec.structs.replace(placement(array(REPLICATED, 64, 64)), layouts=(wide,))
    page = Page(PlacementPicture(made).html())
    assert page.counts["b"] < 200
    assert {"64 columns in total", "64 rows in total"} <= set(page.tips)


def test_a_page_of_many_arrays_is_small_and_counts_omitted_ones() -> None:
    page = PlacementPicture(layers(8000)).html()
    assert len(page.encode()) < 2e6
    found = Page(page)
    assert found.open == []
    drawn = len(re.findall('class="nbd-p"', page))
    assert drawn > 0
    not_drawn = re.findall(r"No room for the pictures of ([\d,]+) arrays", found.text)
    not_listed = re.findall(r"… and ([\d,]+) more array", found.text)
    assert len(not_drawn) == 1
    assert drawn + sum(int(n.replace(",", "")) for n in not_drawn + not_listed) == 8000


def test_a_late_array_is_drawn_after_many_equal_ones() -> None:
    alike = [array(ROWS, 6, 4, path=("p", f"[{i}]")) for i in range(3000)]
    late = array(CUBE, 6, 4, 8, path=("q", "['w']"))
    page = PlacementPicture(placement(*alike, late)).html()
    assert "No room for" not in page
    (_, drawn) = page.split("['w']".replace("'", "&#x27;"))
    assert 'class="nbd-p"' in drawn


def test_names_of_the_user_are_escaped() -> None:
    made = placement(array(ROWS, 6, 4, path=("p", "['<script>']")), notes=("<b>",))
    page = PlacementPicture(made).html()
    assert "<script>" not in page
    assert "['<script>']" in Page(page).text
    assert PlacementPicture(made).png()


def test_a_display_contains_html_picture_and_text() -> None:
    bundle, metadata = many(8)._repr_mimebundle_()
    assert list(bundle) == ["text/html", "image/png", "text/plain"]
    png = bundle["image/png"]
    assert isinstance(png, bytes)
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > height > 0
    assert metadata["image/png"]


def test_a_placement_is_equal_after_json() -> None:
    made = placement(array(CUBE, 6, 4, 8), array(GONE, 6))
    assert msgspec.json.decode(msgspec.json.encode(made), type=Placement) == made
