"""Options of a cell: what `%%dist_run` and `Cluster.run` accept."""

from __future__ import annotations

from typing import Annotated, Literal

from nbdist.records.base import (
    MOST_SEED,
    OnNan,
    Precision,
    Record,
    SampleOrder,
    StrategyName,
)
from nbdist.records.events import SIGNAL_STEPS
from nbdist.records.options import Option
from nbdist.records.plan import Planning


class StepOptions(Record, frozen=True):
    """Options of a step cell; all but the first need `--data`.

    Attributes:
        profile_folder: folder for the trace of rank R, as `rank-R`; empty if it is not stored.
        planning: constraints on the layout, under pjrt.
    """

    data: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Run the cell as a training step, once for each batch of this data set.",
            details="`batch` is the batch. The data set is a name on the workers or in the "
            "notebook: arrays, data frames, a `tf.data.Dataset`, Parquet files, a distributed "
            "data set, an iterable, or a function that returns one. nbdist copies data of the "
            "notebook to the workers once.",
        ),
    ]
    batch: Annotated[
        int,
        Option(
            metavar="N",
            least=0,
            default="elements of the data",
            help="Samples in a global batch.",
            details="Arrays need it. Without it, each element of another data set is a batch.",
        ),
    ] = 0
    epochs: Annotated[int, Option(metavar="N", least=1, help="Passes through the data.")] = 1
    steps: Annotated[
        int, Option(metavar="N", least=0, default="no limit", help="End after N steps.")
    ] = 0
    shuffle: Annotated[
        int | None,
        Option(
            metavar="SEED",
            least=0,
            default="the order of the data",
            help="Shuffle arrays in each epoch, in the same order on all ranks.",
        ),
    ] = None
    order: Annotated[
        SampleOrder,
        Option(
            help="Order of the samples: exact as on one device, or by source.",
            details="With source, each worker reads shards of its own, such as files or row "
            "groups, and a global batch contains samples of all shards. auto reads only a "
            "tf.data.Dataset of enough files by source. See [input data](data.md).",
        ),
    ] = "auto"
    bucket: Annotated[
        tuple[int, ...],
        Option(
            metavar="L,L",
            least=1,
            help="Pad sequences to these lengths, as in 32,64,128.",
            details="In the step, `mask` is true for the positions that are not padding.",
        ),
    ] = ()
    scale_lr: Annotated[
        bool,
        Option(help="Multiply the learning rate by the number of replicas, after a warm-up."),
    ] = False
    check: Annotated[
        bool,
        Option(
            help="First compare one step on one replica with the same step on all replicas.",
            details="nbdist names frequent errors, such as a sum over the batch in place of a "
            "mean. Nothing is trained if values differ. In a plain cell, nbdist checks the first "
            "step of each training loop.",
        ),
    ] = False
    jit: Annotated[
        bool,
        Option(
            help="Compile the whole step of TensorFlow with XLA.",
            details="JAX compiles every step. XLA has no collectives between CPUs: use the "
            "option on GPUs or with one replica.",
        ),
    ] = False
    on_nan: Annotated[
        OnNan,
        Option(
            help="Action on NaN or Inf: stop on all ranks after the same step, or warn.",
        ),
    ] = "stop"
    prefetch: Annotated[
        int | Literal["auto"],
        Option(
            metavar="N|auto",
            least=0,
            help="Prepare N batches ahead; auto begins when steps wait for data.",
        ),
    ] = 0
    profile: Annotated[
        int,
        Option(
            metavar="N",
            least=0,
            help="Trace N steps after the first steps, and show their time by operation.",
            details="nbdist traces on each rank. Under TensorFlow, a trace has no operations.",
        ),
    ] = 0
    profile_folder: str = ""
    planning: Planning = Planning()


class Saving(Record, frozen=True):
    """Checkpoints of a run; all options but the first need `--checkpoint`.

    Attributes:
        every_steps: steps between two checkpoints; 0 if `every_s` counts.
        every_s: seconds between two.
    """

    folder: Annotated[
        str,
        Option(
            flags=("--checkpoint",),
            metavar="DIR",
            help="Save the state of the run in this folder during training, also in fit.",
            details="All hosts share the folder. nbdist replaces a worker that is lost, "
            "and the run continues from the newest checkpoint. The run also continues when the "
            "kernel ends. See [reliability](reliability.md).",
        ),
    ]
    every_steps: Annotated[
        int,
        Option(
            flags=("--save-every",),
            kind="text",
            metavar="N|Ns",
            default="30s",
            help="Interval of checkpoints: N steps, or seconds as in 30s.",
        ),
    ] = 0
    every_s: float = 0.0
    keep: Annotated[int, Option(metavar="N", least=1, help="Number of checkpoints to keep.")] = 3
    resume: Annotated[
        bool, Option(help="Continue from the newest checkpoint in the folder, if there is one.")
    ] = False
    shrink: Annotated[
        bool,
        Option(
            help="Continue with fewer workers if lost workers cannot be replaced.",
            details="The global batch stays the same.",
        ),
    ] = False


class CellOptions(Record, frozen=True):
    """Options of a cell, passed as one object from the magic to the worker.

    Attributes:
        step: run the cell as a step on these data. With empty `data`, the planning options apply
            to the `fit` in the cell, and `check` to its training loops.
        saving: checkpoints of the run; None for none.
    """

    ranks: Annotated[
        str | None,
        Option(
            flags=("-t", "--ranks"),
            metavar="R,R:R",
            default="all",
            help="Ranks to run on, as in 0,2:4 (the end is excluded).",
            details="A cell on some ranks runs outside of the scope of the strategy: a collective "
            "would wait for the other ranks.",
        ),
    ] = None
    strategy: Annotated[
        StrategyName | None,
        Option(
            default="the first framework's",
            help="Strategy whose scope the cell runs in.",
            details="`mirrored` is TensorFlow's MultiWorkerMirroredStrategy, `pjrt` one JAX "
            "runtime over all workers.",
        ),
    ] = None
    step: StepOptions | None = None
    name: Annotated[
        str,
        Option(metavar="NAME", default="as in Cell 30, fit, 20:27", help="Name of the run."),
    ] = ""
    seed: Annotated[
        int | None,
        Option(
            metavar="N",
            least=0,
            most=MOST_SEED,
            default="generators continue",
            help="Seed all random generators before the cell, the same on all workers.",
            details="The generators are those of Python, NumPy, TensorFlow and Keras.",
        ),
    ] = None
    own_data: Annotated[
        bool,
        Option(
            help="Data differ between ranks on purpose: fit and evaluate do not divide batches.",
            details="Batches have the same number of rows on all ranks. See [Keras](keras.md).",
        ),
    ] = False
    no_lift: Annotated[
        bool,
        Option(
            help="Run the loops of the cell as they stand, on every worker.",
            details="Without it, nbdist runs the step of a training loop on all replicas. See "
            "[training loops](loops.md).",
        ),
    ] = False
    precision: Annotated[
        Precision | None,
        Option(
            default="as the layers were made",
            help="Type in which Keras layers compute.",
            details="The loss is scaled in float16. A step under pjrt computes in the types of "
            "its arrays.",
        ),
    ] = None
    guard: Annotated[
        int,
        Option(
            metavar="N",
            least=0,
            help="Compare state between ranks after the first step and every N steps; 0: never.",
            details="State is what ranks have in common: parameters, states of optimizers, "
            "learning rates, seeds. nbdist names the rank and the variable that differ. The option "
            "also applies to `fit`. After a plain cell, nbdist compares the replicated arrays "
            "(pjrt) or mirrored variables (mirrored) that the cell has changed. See [comparison "
            "of replicas](reliability.md#comparison-of-replicas).",
        ),
    ] = 200
    watch: Annotated[
        int | None,
        Option(
            metavar="N",
            bare=0,
            least=0,
            default="off; without N, no histograms",
            help="Record norms of gradients and parameters, the update ratio and learning rates "
            f"every {SIGNAL_STEPS} steps.",
            details="With N, also histograms of parameters and gradients every N steps. See "
            "[training signals](runs.md#training-signals).",
        ),
    ] = None
    hang_after_s: Annotated[
        float,
        Option(
            flags=("--hang-after",),
            metavar="S",
            default="10x the step time, at least 30 s",
            help="Cancel a step after S seconds without progress.",
            details="Before the first steps have shown how long a step takes, the default is ten "
            "minutes. See [hangs](reliability.md#hangs).",
        ),
    ] = 0.0
    saving: Saving | None = None
    max_heals: Annotated[
        int,
        # A run that loses workers more often has a cause that recovery does not remove.
        Option(
            metavar="N",
            least=0,
            help="Largest number of recoveries in an hour, of a run with --checkpoint.",
        ),
    ] = 10
    once: Annotated[
        bool, Option(help="Never run this cell again in the recovery of a later run.")
    ] = False
    detach: Annotated[
        bool,
        Option(
            help="Let the cell continue when the kernel of this notebook ends.",
            details="Cells with `--checkpoint` always do. `%dist_attach` follows it again.",
        ),
    ] = False
