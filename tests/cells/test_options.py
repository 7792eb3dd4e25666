"""Options of a cell, from typed text or keywords. Both use the same definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.cells.options import OPTIONS, cell_options, check_options
from nbdist.errors import UsageError
from nbdist.records import CellOptions, Option, Planning, Saving, StepOptions, options_of

if TYPE_CHECKING:
    from pathlib import Path


def test_omitted_options_have_the_defaults_of_the_records() -> None:
    assert cell_options(dict.fromkeys(OPTIONS)) == CellOptions()
    assert cell_options({"jit": False, "resume": False, "once": False}) == CellOptions()


def test_typed_text_and_keywords_give_the_same_options(tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    typed = cell_options(
        {
            "data": "train",
            "bucket": "8,16",
            "prefetch": "4",
            "hang_after": "1.5",
            "checkpoint": folder,
            "save_every": "100",
            "budget": "1kB",
            "fix": "tensor=2,remat=full",
        }
    )
    assert typed == CellOptions(
        step=StepOptions(
            data="train",
            bucket=(8, 16),
            prefetch=4,
            planning=Planning(budget=1000, fixed={"model": 2}, remat="full"),
        ),
        hang_after_s=1.5,
        saving=Saving(folder=folder, every_steps=100),
    )
    in_python = {"data": "train", "bucket": (8, 16), "prefetch": 4, "hang_after": 1.5}
    in_python |= {"checkpoint": folder, "save_every": 100, "budget": 1000, "fix": "tp=2,remat=full"}
    assert cell_options(in_python) == typed
    assert cell_options({"step": typed.step, "saving": typed.saving, "hang_after_s": 1.5}) == typed


def test_signals_are_recorded_with_or_without_histograms() -> None:
    assert cell_options({"watch": True}) == CellOptions(watch=0)
    assert cell_options({"watch": 0}) == CellOptions(watch=0)
    assert cell_options({"watch": 100}) == CellOptions(watch=100)
    assert cell_options({"watch": None}) == CellOptions()


def test_checkpoints_are_saved_every_30_seconds_by_default() -> None:
    assert cell_options({"checkpoint": "/kept"}).saving == Saving(folder="/kept", every_s=30.0)


def test_the_layout_of_a_fit_needs_no_data() -> None:
    assert cell_options({"fix": "tp=2"}).step == StepOptions(
        data="", planning=Planning(fixed={"model": 2})
    )


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        cell_options(
            {"bucket": "8,y", "prefetch": "some", "hang_after": "nan", "keep": 2, "steps": 3}
        )
    hint = "; use .prefetch(tf.data.AUTOTUNE) on the data of `fit`"
    assert str(refused.value).splitlines() == [
        "--bucket 8,y: use lengths, as in --bucket 32,64,128",
        "--prefetch some: use auto, or a number of batches, as in --prefetch 4",
        "--hang-after nan: use a number of seconds, as in --hang-after 60",
        f"--steps, --bucket, --prefetch without --data: name the data set of the step{hint}",
        "--keep without --checkpoint: name the folder",
    ]


def test_unknown_keywords_are_reported_with_the_closest_valid_ones() -> None:
    with pytest.raises(UsageError) as refused:
        cell_options({"data": "train", "epoch": 2, "save-every": None, "bucket": "y", "xyz": 1})
    assert str(refused.value).splitlines() == [
        "epoch: no option has this name; did you mean epochs?",
        "save-every: no option has this name; did you mean save_every?",
        "--bucket y: use lengths, as in --bucket 32,64,128",
        f"xyz: no option has this name; options are {', '.join(sorted(OPTIONS))}",
    ]


@pytest.mark.parametrize("name", [name for name, o in OPTIONS.items() if o.least is not None])
def test_numbers_are_checked_against_the_range_of_their_option(name: str) -> None:
    option = OPTIONS[name]
    assert option.least is not None
    outside = option.least - 1
    other = {"data": "train"} if option.record is StepOptions else {"checkpoint": "/kept"}
    value = (outside,) if name == "bucket" else outside
    options = cell_options({**other, name: value})
    with pytest.raises(UsageError, match=f"^{option.flag} {outside}: use a whole number from"):
        check_options(options, "mirrored")


def test_options_are_equal_after_encoding_and_decoding() -> None:
    options = cell_options({"data": "train", "batch": 8, "checkpoint": "/kept", "ranks": "0:2"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=CellOptions) == options


def test_a_field_gives_name_type_choices_and_default() -> None:
    options = options_of(CellOptions)
    assert options["guard"].kind == "number"
    assert options["guard"].default == "200"
    assert options["jit"].kind == "switch"
    assert options["on_nan"].choices == ("stop", "warn")
    assert options["save_every"].field == "every_steps"
    assert options["save_every"].record is Saving


def test_the_error_of_a_seed_contains_its_range() -> None:
    option = Option(help="A seed.", flags=("--seed",), least=0, most=9)
    assert option.faults(3) == []
    assert option.faults(10, True) == [
        "--seed 10: use a whole number from 0 to 9",
        "--seed True: use a whole number from 0 to 9",
    ]
