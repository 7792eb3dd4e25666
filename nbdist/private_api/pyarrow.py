"""Private names of PyArrow."""

from __future__ import annotations

from nbdist.private_api.features import Library

LIBRARY = Library("PyArrow", "pyarrow", {"Dataset": "pyarrow.dataset:Dataset"})

FILTERS = LIBRARY.feature("data sets of PyArrow, which may have a filter", "Dataset._scan_options")
