"""Magic `%dist_devices`, on a cluster or in the notebook's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, magics_class

from nbdist.magics.base import SharedClusterMagics
from nbdist.magics.options import command, parse
from nbdist.parallel.placement.devices import devices_apart
from nbdist.records import Option

if TYPE_CHECKING:
    from nbdist.views.cluster.devices import DevicesPicture


@magics_class
class DeviceMagics(SharedClusterMagics):
    """Magics for devices."""

    @command(
        Option(
            flags=("--bench",),
            kind="switch",
            help="Measure matrix products, memory, transfers and links.",
            details="Steps are planned with the measured values.",
        )
    )
    @line_magic
    def dist_devices(self, line: str) -> DevicesPicture:
        """Show devices of all workers, and their links; without workers, of this machine."""
        bench = parse(self.dist_devices, line).bench
        if self._front.has_cluster():
            return self._front.shown(
                self._front.running_cluster("%dist_devices").devices(bench=bench)
            )
        return self._front.shown(devices_apart(bench=bench))
