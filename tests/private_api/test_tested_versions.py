import pytest

from nbdist.private_api import tested_versions
from nbdist.private_api.tested_versions import TESTED, is_tested


@pytest.mark.parametrize("library", TESTED)
def test_versions_of_a_series_are_tested(library: str, caplog: pytest.LogCaptureFixture) -> None:
    assert all(is_tested(library, f"{series}3") for series in TESTED[library])
    assert not caplog.records


def test_other_versions_are_named_with_the_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(tested_versions.TESTED, "Keras", ("3.14.", "3.15."))
    assert not is_tested("Keras", "3.16.0")
    assert not is_tested("Keras", "3.1.50", "each rank writes")
    assert caplog.messages == [
        "Keras 3.16.0 is not tested with nbdist: it stays as upstream. Use 3.14.x, 3.15.x",
        "Keras 3.1.50 is not tested with nbdist: each rank writes. Use 3.14.x, 3.15.x",
    ]
