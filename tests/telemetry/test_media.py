"""Media of a run on disk, in TensorBoard's event files, and in messages to a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.records import DataTable, Histogram, Image, Media, MediaMessage, Text
from nbdist.telemetry.media import MediaFiles, MediaIndex, decode_content, read_content, read_index
from nbdist.telemetry.run_writer import RunDirectory
from nbdist.telemetry.tail import Tail
from nbdist.telemetry.tensorboard import EventFiles
from tests.runs import largest_file, losses, new_run, new_state, read
from tests.telemetry.test_tensorboard import read as read_events

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import AnyMedia

BELL = Histogram(edges=(-1.0, 0.0, 2.0), counts=(1.0, 3.0), size=4, mean=0.5, deviation=0.25)
PICTURE = Image(width=2, height=1, png=b"\x89PNG")
TABLE = DataTable(columns=("name", "loss"), rows=(("a|b", 1.5), (None, 2.0)), left_out=3)
ALL: tuple[AnyMedia, ...] = (BELL, PICTURE, TABLE, Text(text="hello"))
MOST = 10_000


def media(content: AnyMedia, step: int = 1, rank: int = 0, name: str = "x") -> Media:
    return Media(
        rank=rank, cell=1, name=name, epoch=-1, step=step, time_s=step / 10, content=content
    )


def contents(folder: Path) -> list[AnyMedia]:
    return [decode_content(read_content(folder, entry)) for entry in read_index(folder)]


def test_contents_are_read_as_they_were_reported(tmp_path: Path) -> None:
    files = MediaFiles(tmp_path / "media", MOST)
    for step, content in enumerate(ALL):
        assert files.take(media(content, step, rank=step % 2))
    assert contents(tmp_path / "media") == list(ALL)
    entries = list(read_index(tmp_path / "media"))
    assert [(e.number, e.kind, e.rank, e.step) for e in entries] == [
        (0, "histogram", 0, 0),
        (1, "image", 1, 1),
        (2, "table", 0, 2),
        (3, "text", 1, 3),
    ]


def test_equal_contents_of_ranks_are_stored_once(tmp_path: Path) -> None:
    files = MediaFiles(tmp_path, MOST)
    files.take(media(BELL))
    size = (tmp_path / "content.bin").stat().st_size
    files.take(media(BELL, rank=1))
    assert (tmp_path / "content.bin").stat().st_size == size
    assert contents(tmp_path) == [BELL, BELL]


def test_a_limit_ends_the_media_with_its_setting(tmp_path: Path) -> None:
    files = MediaFiles(tmp_path, 1000)
    stored = [files.take(media(Text(text=f"{step}" * 100), step)) for step in range(10)]
    kept = stored.index(False)
    assert 0 < kept < 10
    assert not any(stored[kept:])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000
    assert files.fault == (
        f"histograms, images, tables and texts after step {kept} are not stored: "
        "a run has at most 1,000 bytes of them (NBDIST_MEDIA_BYTES)"
    )


def test_another_process_continues_after_an_incomplete_line(tmp_path: Path) -> None:
    MediaFiles(tmp_path, MOST).take(media(BELL))
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b'{"number": 1, "ki')
    MediaFiles(tmp_path, MOST).take(media(PICTURE))
    assert contents(tmp_path) == [BELL, PICTURE]
    assert [entry.number for entry in read_index(tmp_path)] == [0, 1]


def test_a_full_disk_ends_the_media_and_not_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with largest_file(4000):
        run.take(media(Text(text="a" * 5000)))
        run.take(media(BELL))
    assert "the histograms, images, tables and texts end early" in run.fault
    run.take(losses(1, 2))
    run.close()
    assert len(read(run).array(read(run).tables()[0])) == 2


def test_an_index_is_read_as_it_grows(tmp_path: Path) -> None:
    index = MediaIndex(tmp_path)
    assert index.news(MOST) == ()
    files = MediaFiles(tmp_path, MOST)
    files.take(media(BELL))
    (first,) = index.news(MOST)
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b"{")
        file.flush()
        assert index.news(MOST) == ()
        file.truncate(file.tell() - 1)
    files.take(media(PICTURE))
    (second,) = index.news(MOST)
    index.close()
    assert (first.number, second.number) == (0, 1)


def test_a_browser_receives_the_index_and_then_one_content(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    tail = Tail(read(run))
    list(tail.news())
    run.take(media(BELL))
    (sent,) = [msgspec.json.decode(text, type=MediaMessage) for text in tail.news()]
    tail.close()
    (entry,) = sent.entries
    content = read(run).media_content(entry.number)
    assert content is not None
    assert decode_content(content) == BELL
    assert read(run).media_content(1) is None


def test_a_run_with_media_alone_has_no_event_of_scalars(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, new_state(), "", media_bytes=0)
    run.take(media(BELL))
    run.close()
    assert not (run.path / "events").exists()
    assert "NBDIST_MEDIA_BYTES" in run.fault


def test_tensorboard_reads_each_kind(tmp_path: Path) -> None:
    events = EventFiles(tmp_path, 1000.0)
    for step, content in enumerate(ALL):
        events.take_media(media(content, step, rank=1, name=f"name{step}"))
    events.close()
    found = {
        value.tag: (event.step, event.wall_time, value)
        for event in read_events(tmp_path / "rank-1")
        for value in event.summary.value
    }
    step, wall_time, value = found["name0"]
    assert (step, wall_time) == (0, 1000.0)
    assert list(value.histo.bucket_limit) == [0.0, 2.0]
    assert list(value.histo.bucket) == [1.0, 3.0]
    assert (value.histo.min, value.histo.max, value.histo.num, value.histo.sum) == (-1, 2, 4, 2)
    assert value.histo.sum_squares == 4 * (0.25**2 + 0.5**2)
    image = found["name1"][2].image
    assert (image.width, image.height, image.encoded_image_string) == (2, 1, b"\x89PNG")
    table, text = found["name2"][2], found["name3"][2]
    assert table.metadata.plugin_data.plugin_name == "text"
    assert table.tensor.string_val[0].decode() == (
        "| name | loss |\n| --- | --- |\n| a\\|b | 1.5 |\n|  | 2 |\n\n3 more rows"
    )
    assert (text.tensor.dtype, list(text.tensor.string_val)) == (7, [b"hello"])
