"""Placement of a large model."""

from __future__ import annotations

from nbdist.records import Layout, MeshShape, PlacedArray, PlacedDevice, Placement

AXES = (4, 16)
PER_RANK = 8


def layers(count: int) -> Placement:
    """Return `count` arrays of different shapes, four per layer, sharded over both mesh axes."""
    rows, columns = AXES
    every = tuple(range(rows * columns))
    layout = Layout(
        kind="sharded",
        devices=every,
        blocks=every,
        parts=AXES,
        axes=(("data",), ("model",)),
        spec="P('data', 'model')",
        mesh=0,
    )
    arrays = (
        PlacedArray(
            path=("params", f"['layer_{i // 4}']", f"['w{i % 4}']"),
            shape=(rows * (i + 1), columns),
            dtype="float32",
            nbytes=4 * rows * columns * (i + 1),
            layout=0,
        )
        for i in range(count)
    )
    return Placement(
        names=("params",),
        hosts=dict.fromkeys(range(len(every) // PER_RANK), "host"),
        devices=tuple(PlacedDevice(d // PER_RANK, f"gpu:{d % PER_RANK}") for d in every),
        meshes=(MeshShape(axes=("data", "model"), sizes=AXES, devices=every),),
        layouts=(layout,),
        arrays=tuple(arrays),
    )
