"""Static picture of a timeline."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET

from nbdist.records import HOST_COPIES
from nbdist.utils.timelines import timeline_of
from nbdist.views.timeline import SHOWN_LANES, description, picture, svg
from tests.utils.test_timelines import busy

TIMELINE = timeline_of(
    [
        busy(0, 4, "<dot>"),
        busy(5, 10, "all-reduce", kind="collective"),
        busy(2, 3, "wait", kind="input", device=HOST_COPIES),
    ],
    most=10,
)


def test_the_picture_has_a_row_for_each_lane_to_scale() -> None:
    root = ET.fromstring(svg(TIMELINE))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[-3:] == [
        "rank 0 · host · input",
        "rank 0 · device 0 · collective",
        "rank 0 · device 0 · compute",
    ]
    assert texts[:2] == ["0 ms", "2 ms"]
    bars = re.findall(r'd="M0 \d+([^"]+)" stroke="#(?:a87b00|d55e00|1f77d0)"', svg(TIMELINE))
    assert bars == ["m59 0h29", "m147 0h148", "m0 0h118"]


def test_the_picture_is_an_image_with_a_text_that_survives_a_sanitizer() -> None:
    element = picture(TIMELINE)
    assert 'alt="Timeline of 10.0 ms, rank 0: 3 lanes (compute, collective, input)"' in element
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', element)
    assert data is not None
    assert base64.b64decode(data[1]).decode() == svg(TIMELINE)
    assert picture(timeline_of([], most=1)) == ""


def test_the_size_of_the_picture_is_limited() -> None:
    spans = [
        busy(0.1 * step, 0.1 * step + 0.05, device=device)
        for device in range(SHOWN_LANES + 2)
        for step in range(400)
    ]
    timeline = timeline_of(spans, most=4000)
    assert "… and 2 more lanes" in svg(timeline)
    assert len(picture(timeline)) < 25_000
    assert "18 lanes" in description(timeline)
