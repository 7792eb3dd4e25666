"""Magics `%%dist_plan` of a cell, and `%dist_plan` of a model or of names in a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import line_cell_magic, magics_class
from msgspec import structs

from nbdist.cells.options import OPTIONS
from nbdist.errors import PlanError, UsageError
from nbdist.magics.base import SharedClusterMagics
from nbdist.magics.options import (
    OUTPUT,
    PLANNING,
    RUNNING,
    check_name,
    command,
    options_from,
    parse,
)
from nbdist.records import Option, StepOptions
from nbdist.views.plan.names import NamesPicture
from nbdist.views.plan.picture import PlanPicture

if TYPE_CHECKING:
    from argparse import Namespace

    from nbdist.execution.result import Run
    from nbdist.records import CellOptions, Plan
    from nbdist.session.cluster import Cluster

WITHOUT_EFFECT = tuple(
    option
    for option in RUNNING
    if option.name not in {"data", "batch", "output", "bucket", "precision", "ranks"}
    and option not in PLANNING
)
"""Options of `%%dist_run` that do not change a plan. `%%dist_plan` accepts them."""

_FIT = "{model}.fit(*({data} if isinstance({data}, tuple) else ({data},)), batch_size={batch})"


@magics_class
class PlanMagics(SharedClusterMagics):
    """Magics for plans."""

    _shown: tuple[Plan, Run | None] | None = None

    @command(
        Option(
            flags=("names",),
            nargs="*",
            metavar="NAME",
            help="Without a cell: a Keras model, or names in the newest plan.",
        ),
        OPTIONS["data"].but(
            default="the data of the first `fit`",
            help="Data set of the step, or of the model.",
            details="Without it, nbdist plans the first `fit` of the cell.",
        ),
        OPTIONS["batch"],
        OPTIONS["on"],
        OPTIONS["verify"],
        *PLANNING,
        OUTPUT.but(help="Store the plan under this name."),
        ignored=WITHOUT_EFFECT,
    )
    @line_cell_magic
    def dist_plan(self, line: str, cell: str | None = None) -> PlanPicture | NamesPicture:
        """Plan the layout of a step over devices, with its cost. Nothing is trained.

        Without `--data`, nbdist runs the cell up to its first `fit`, and plans that. `%dist_plan
        model --data train --batch 64` plans the `fit` of a model. `%dist_plan params` shows names
        in the plan that was shown or run last. Options of `%%dist_run` that do not change the plan
        are accepted without effect.
        """
        args = parse(self.dist_plan, line)
        cluster = self._front.running_cluster("%%dist_plan")
        check_name(args.output)
        if cell is None and not args.data:
            return self._show_names(cluster, args)
        header = f"{'%' if cell is None else '%%'}dist_plan {line}"
        model = "" if cell is not None else _model(args)
        if cell is not None and args.names:
            raise UsageError(f"{' '.join(args.names)}: remove the names; the cell is planned")
        if args.data:
            self._front.move_data(cluster, args.data)
        if model:
            cell = _FIT.format(model=model, data=args.data, batch=args.batch)
            args.data = args.batch = None  # they are arguments of `fit`
        options = _plan_options(args)
        plan = _planned(
            cluster, cell or "", options, label=self._front.cell_number(), header=header
        )
        self._keep(args, plan)
        self._shown = plan, cluster.last_run
        return self._front.shown(PlanPicture(plan))

    def _show_names(self, cluster: Cluster, args: Namespace) -> NamesPicture:
        if not args.names:
            raise UsageError(
                "nothing to plan: write a step below %%dist_plan --data NAME, or use a Keras model "
                "(%dist_plan model --data train --batch 64) or names in a plan (%dist_plan params)"
            )
        plan = self._newest(cluster)
        if plan is None:
            raise UsageError(
                f"no plan yet for {' '.join(args.names)}: plan the step that uses it with "
                "%%dist_plan --data NAME, or add --data NAME for a Keras model"
            )
        picture = NamesPicture(plan, args.names)
        self._keep(args, picture.plan)
        return self._front.shown(picture)

    def _newest(self, cluster: Cluster) -> Plan | None:
        """Return the plan that was run or shown last; None without one."""
        run = cluster.last_run
        if self._shown is not None and run is self._shown[1]:
            return self._shown[0]
        ran = run.plan if run is not None else None
        return ran or (self._shown[0] if self._shown is not None else None)

    def _keep(self, args: Namespace, plan: Plan) -> None:
        if args.output:
            self.shell.user_ns[args.output] = plan


def _planned(cluster: Cluster, cell: str, options: CellOptions, *, label: int, header: str) -> Plan:
    """Return the plan of a step.

    Args:
        cluster: the cluster whose workers trace the step.
        cell: the step.
        options: the data of the step and the constraints on the plan, with `planning.only`.
        label: the notebook's execution count.
        header: the line above the cell in the notebook.

    Raises:
        CellError: no layout fits, or the step cannot be traced.
        UsageError: the workers do not run JAX, or the cell is not a step.
    """
    run = cluster.run(cell, structs.replace(options, strategy="pjrt"), label=label, header=header)
    if run.plan is None:
        raise PlanError("the workers returned no plan: report this as a bug of nbdist")
    return run.plan


def _plan_options(args: Namespace) -> CellOptions:
    """Return the options of a cell that is planned but not run.

    Raises:
        UsageError: an option is wrong, or needs another one.
    """
    if args.batch and args.data is None:
        raise UsageError("--batch without --data: set the batch size in `fit` instead")
    if args.strategy == "mirrored":
        raise UsageError("--strategy mirrored: plans are for pjrt, so remove the option")
    options = options_from(args, **dict.fromkeys(option.name for option in WITHOUT_EFFECT))
    step = options.step or StepOptions(data="")
    planning = structs.replace(step.planning, only=True)
    return structs.replace(options, step=structs.replace(step, planning=planning))


def _model(args: Namespace) -> str:
    """Return the name of the model.

    Raises:
        UsageError: the line does not contain exactly one valid name.
    """
    if len(args.names) != 1 or not args.names[0].isidentifier():
        raise UsageError(
            "--data without a cell: add the name of one Keras model, as in %dist_plan model "
            "--data train --batch 64"
        )
    name: str = args.names[0]
    return name
