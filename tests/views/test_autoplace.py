"""Report of `@autoplace`."""

from __future__ import annotations

from nbdist.records.autoplace import Decision, LeftOut, Timed
from nbdist.views.autoplace import DRAWN, SHOWN, AutoplacePicture

PNG = b"\x89PNG\r\n\x1a\n"


def decision(number: int = 0, *, is_timed: bool = True) -> Decision:
    timed = (
        Timed(name="default", words="inputs stay on cpu:0", median_s=2e-3, spread_s=1e-4, rounds=9),
        Timed(name="batch", words="8 rows", median_s=5e-4, spread_s=9e-4, rounds=9, note="<b>"),
    )
    return Decision(
        function="m.f",
        fingerprint=str(number),
        inputs=f"float32[{number}] $from$ the host",
        chosen="batch",
        why="4 times as fast as the default",
        made=1.0,
        timed=timed if is_timed else (),
        left_out=(LeftOut(name="model", why="no dimension divides"),),
    )


def test_each_candidate_is_shown_with_its_reason() -> None:
    text = repr(AutoplacePicture("m.f", [decision()]))
    assert text.startswith("m.f: 1 kind of inputs\n")
    assert "chosen: batch, 4 times as fast as the default (measured 19" in text
    default, batch = (line for line in text.splitlines() if " 9" in line and "s  " in line)
    assert " ".join(default.split()) == "default inputs stay on cpu:0 2 ms 100 µs 9"
    assert batch.startswith("✓  batch")
    assert "excluded: model: no dimension divides" in text


def test_the_page_has_the_same_content_and_escapes_it() -> None:
    page = AutoplacePicture("m.<lambda>", [decision()]).html()
    assert "m.&lt;lambda&gt;" in page
    assert "&lt;b&gt;" in page
    assert "<table" in page


def test_measurements_are_shown_in_a_picture() -> None:
    measured = AutoplacePicture("m.f", [decision()] * (DRAWN + 1))
    assert measured.png().startswith(PNG)
    assert measured.html().count('src="data:image/png;base64,') == 1
    assert "<img" not in AutoplacePicture("m.f", [decision(is_timed=False)]).html()


def test_the_latest_kinds_of_inputs_are_shown() -> None:
    many = [decision(number) for number in range(SHOWN + 3)]
    lines = AutoplacePicture("m.f", many).lines()
    assert sum(line.startswith("inputs: ") for line in lines) == SHOWN
    assert f"inputs: float32[{SHOWN + 2}] $from$ the host" in lines
    assert lines[-1] == "and 3 older kinds"


def test_a_report_before_any_call_states_so() -> None:
    assert repr(AutoplacePicture("m.f", [])) == "m.f: no measurements yet: call the function"
