"""Private names of ipykernel."""

from __future__ import annotations

from nbdist.private_api.features import Library

LIBRARY = Library(
    "ipykernel",
    "ipykernel",
    {
        "IPythonKernel": "ipykernel.ipkernel:IPythonKernel",
        "SubshellKernel": "ipykernel.ipkernel:IPythonKernel",
    },
    since={"SubshellKernel": (7, 1)},
)

INTERRUPTS = LIBRARY.feature(
    "interrupts of cells, and cells with `await`",
    *("IPythonKernel.post_handler_hook", "IPythonKernel.pre_handler_hook"),
    *("SubshellKernel._supports_kernel_subshells", "SubshellKernel.shell_channel_thread"),
    is_tested_only=True,
)
