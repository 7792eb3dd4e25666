"""Text of exceptions: the summary in one line, and the message without frames of libraries."""

from __future__ import annotations

import pytest

from nbdist.utils.error_text import described, without_library_frames

IN_USER_CODE = """in user code:

    File "/tmp/ipykernel_7/3.py", line 7, in train_step  *
        y = model(x)
    File "/lib/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler  **
        raise e.with_traceback(filtered_tb) from None

    ValueError: Input 0 of layer "dense" is incompatible with the layer

"""
OF_A_LAYER = """Exception encountered when calling Sequential.call().

\x1b[1mInvalid input shape (64, 3).\x1b[0m

Arguments received by Sequential.call():
  • training=True"""
OF_AN_OPERATION = """Graph execution error:

Detected at node loss/Gather defined at (most recent call last):
  File "/lib/site-packages/keras/src/losses/losses.py", line 34, in call

  File "/home/me/mine.py", line 5, in loss

  File "/lib/site-packages/keras/src/ops/nn.py", line 2216, in take

indices[0,0] = 9 is not in [0, 4)
\t [[{{node loss/Gather}}]] [Op:__inference_f_7]"""
OF_JAX = """dot_general requires equal shapes.
--------------------
For simplicity, JAX has removed its internal frames"""


@pytest.mark.parametrize(
    ("name", "message", "summary"),
    [
        ("ValueError", "no number", "ValueError: no number"),
        ("KeyError on rank 2@a.b", "'x'", "KeyError on rank 2@a.b: 'x'"),
        (
            "ValueError on rank 1@h",
            IN_USER_CODE,
            'ValueError on rank 1@h: Input 0 of layer "dense" is incompatible with the layer',
        ),
        ("ValueError", OF_A_LAYER, "ValueError: Invalid input shape (64, 3)."),
        (
            "InvalidArgumentError",
            OF_AN_OPERATION,
            "InvalidArgumentError: indices[0,0] = 9 is not in [0, 4)",
        ),
        ("TypeError", OF_JAX, "TypeError: dot_general requires equal shapes."),
        ("StopIteration", "", "StopIteration"),
    ],
)
def test_the_first_line_of_an_error_is_the_useful_one(
    name: str, message: str, summary: str
) -> None:
    first, _, rest = described(name, message).partition("\n\n")
    assert first == summary
    assert "\x1b" not in rest
    assert rest == "" or message.split("\n")[0] in rest


def is_library(file: str) -> bool:
    return "site-packages" in file


def test_frames_of_libraries_are_removed_from_a_message() -> None:
    shown = without_library_frames(OF_AN_OPERATION, is_library)
    assert [line for line in shown.split("\n") if "File" in line] == [
        '  File "/home/me/mine.py", line 5, in loss'
    ]
    assert "indices[0,0] = 9 is not in [0, 4)" in shown
    traced = without_library_frames(IN_USER_CODE, is_library)
    assert "y = model(x)" in traced
    assert "error_handler" not in traced
    assert "raise e.with_traceback" not in traced


def test_a_heading_without_frames_is_removed_too() -> None:
    alone = OF_AN_OPERATION.replace("/home/me/", "/lib/site-packages/")
    shown = without_library_frames(alone, is_library)
    assert shown.startswith(
        "Graph execution error:\n\nDetected at node loss/Gather\n\nindices[0,0] = 9"
    )


def test_a_message_without_frames_stays() -> None:
    text = 'the file "/lib/site-packages/x" is absent\n  File a, line 3'
    assert without_library_frames(text, is_library) == text
