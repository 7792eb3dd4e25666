import pytest

from nbdist.worker.runtime.tested_versions import is_tested


def test_versions_of_the_series_are_tested(caplog: pytest.LogCaptureFixture) -> None:
    assert is_tested("TensorFlow", "2.21.3", "2.21.")
    assert not caplog.records


@pytest.mark.parametrize(
    ("patched", "message"),
    [
        ("", "nbdist does not patch Keras 3.16.0: use 3.15.x"),
        ("saves", "nbdist does not patch saves of Keras 3.16.0: use 3.15.x"),
    ],
)
def test_other_versions_are_named(
    patched: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not is_tested("Keras", "3.16.0", "3.15.", patched)
    assert caplog.messages == [message]
