"""Files that start an exported program on several hosts: for Slurm, Open MPI, Kubernetes, ssh."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.cluster.host_request import malformed
from nbdist.errors import UsageError
from nbdist.jobs.kubernetes_files import NOTICE_S, PORT, kubernetes_files
from nbdist.utils.processes import CONTINUES, TERMINATED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.records import Batch, ProgramLaunch

_NAME = re.compile(r"[^a-z0-9]+")
_LONGEST = 40  # of a Kubernetes name, which gets a suffix for each pod

_SBATCH = """\
#!/bin/sh
#SBATCH --job-name={name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=TERM@{notice}
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
{options}
# Start: sbatch train.sbatch --epochs 10
# At SIGTERM, also {notice} s before the time limit, the program saves a checkpoint and exits with
# {continues}. The job is then requeued, and continues from the checkpoint.
continues=".continues-$SLURM_JOB_ID"
rm -f "$continues"
export continues
# srun ends all ranks if one fails. A rank that has saved exits with 0 until the others have too.
srun --kill-on-bad-exit=1 --unbuffered sh -c '
  trap : TERM
  python train.py "$@"
  status=$?
  [ $status -eq {continues} ] || exit $status
  : >"$continues"
' sh{checkpoint} "$@"
status=$?
if [ $status -eq 0 ] && [ -e "$continues" ]; then
  rm -f "$continues"
  scontrol requeue "$SLURM_JOB_ID"
  status={continues}
fi
exit $status
"""

_RUN = """\
#!/bin/sh
# Start: sh run.sh --epochs 10
exec "${{PYTHON:-python}}" -m nbdist.cli run train.py --hosts {hosts}{checkpoint} "$@"
"""

_MPIRUN = """\
#!/bin/sh
# Start: HOSTFILE=hosts.txt sh mpirun.sh --epochs 10
# The first host of the file is rank 0. Without HOSTFILE, all ranks run on this machine.
if [ -n "$HOSTFILE" ]; then
  options="--hostfile $HOSTFILE --map-by node"
  first=$(awk 'NF {{print $1; exit}}' "$HOSTFILE")
else
  options="--oversubscribe --bind-to none"
  first=127.0.0.1
fi
export MASTER_ADDR="${{MASTER_ADDR:-$first}}" MASTER_PORT="${{MASTER_PORT:-{port}}}"
shared="-x MASTER_ADDR -x MASTER_PORT"
for name in $(env | sed -n 's/^\\(NBDIST_[A-Z0-9_]*\\)=.*/\\1/p'); do
  shared="$shared -x $name"
done
# After SIGTERM, mpirun would end the ranks before they save. It passes SIGUSR1 on.
pid= asked= woken=
trap 'asked=1 woken=1; [ -z "$pid" ] || kill -USR1 $pid' TERM
trap woken=1 INT
mpirun -n {hosts} $options{own} $shared \\
  python train.py{checkpoint} "$@" &
pid=$!
[ -z "$asked" ] || kill -USR1 $pid
while :; do
  woken=
  wait $pid
  status=$?
  [ -n "$woken" ] || exit $status
done
"""

_HOSTS = """\
#!/bin/bash
# Start: bash hosts.sh gpu1 gpu2 -- --epochs 10
# Each host needs this folder at the same path, with the packages of requirements.txt.
# The first host is rank 0. If a rank fails, the others are ended.
hosts=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do hosts+=("$1"); shift; done
[ "$1" = "--" ] && shift
if [ ${{#hosts[@]}} -eq 0 ]; then hosts=({hosts}); fi
if [ ${{#hosts[@]}} -eq 0 ]; then
  echo "name the hosts: bash hosts.sh gpu1 gpu2 -- --epochs 10" >&2
  exit 2
fi
address=${{MASTER_ADDR:-${{hosts[0]#*@}}}} port=${{MASTER_PORT:-{port}}} python=${{PYTHON:-python}}
here=$(printf '%q' "$PWD") own=
for name in "${{!NBDIST_@}}"; do own+="$name=$(printf '%q' "${{!name}}") "; done
words=
if [ $# -gt 0 ]; then words=$(printf ' %q' "$@"); fi
ssh=(ssh ${{NBDIST_SSH_CONFIG:+-F "$NBDIST_SSH_CONFIG"}}) ranks=()
trap 'kill $(jobs -p) 2>/dev/null' EXIT
# The end of a connection kills its rank. A second connection passes SIGTERM on to rank 0. All ranks
# then save.
stop="kill -TERM \\$(cat $here/.rank-0)"
trap 'woken=1; "${{ssh[@]}}" "${{hosts[0]}}" "$stop" </dev/null' TERM
for rank in "${{!hosts[@]}}"; do
  place="RANK=$rank WORLD_SIZE=${{#hosts[@]}} MASTER_ADDR=$address MASTER_PORT=$port"
  # A terminal (-tt) lets the host end its rank when the connection ends.
  run="cd $here && echo \\$\\$ >.rank-$rank &&"
  run+=" $place ${{own}}exec $python train.py{checkpoint}$words"
  "${{ssh[@]}}" -tt "${{hosts[$rank]}}" "$run" </dev/null &
  ranks[$!]=$rank
done
left=${{#hosts[@]}}
while [ $left -gt 0 ]; do
  woken=
  wait -n -p ended
  status=$?
  if [ -n "$woken" ]; then continue; fi
  if [ $status -eq {continues} ]; then wait; fi  # until the other ranks have saved
  if [ $status -ne 0 ]; then
    if [ $status -ne {continues} ] && [ $status -ne {terminated} ]; then
      rank=${{ranks[$ended]}}
      echo "rank $rank on ${{hosts[$rank]}} failed with status $status: all ranks end" >&2
    fi
    exit $status
  fi
  left=$((left - 1))
done
"""


def job_name(folder: str) -> str:
    """Return the name of a job whose folder has this name: lowercase letters, digits and `-`."""
    return _NAME.sub("-", folder.lower()).strip("-")[:_LONGEST].strip("-") or "train"


def launch_files(
    launch: ProgramLaunch | None,
    *,
    name: str,
    hosts: Sequence[str],
    checkpoint: bool,
    python: str,
) -> dict[str, str]:
    """Return the texts of the files, by their names.

    Args:
        launch: the scheduler, with its options; `ssh` for hosts without one; `local` for this
            machine; None for no files.
        name: name of the folder.
        hosts: ssh names of the hosts, empty for this machine.
        checkpoint: True if the program has the option `--checkpoint`.
        python: version of Python, such as `3.11`.

    Raises:
        UsageError: nbdist writes no such files, or the options do not fit the scheduler.
    """
    if launch is None:
        return {}
    common = {
        "name": job_name(name),
        "count": str(len(hosts)),
        "checkpoint": " --checkpoint checkpoints" if checkpoint else "",
    }
    if launch == "local":
        return {"run.sh": _RUN.format(hosts=common["count"], checkpoint=common["checkpoint"])}
    if launch == "ssh":
        named = " ".join(host for host in hosts if host)
        text = _HOSTS.format(
            hosts=named,
            port=PORT,
            checkpoint=common["checkpoint"],
            continues=CONTINUES,
            terminated=TERMINATED,
        )
        return {"hosts.sh": text}
    if launch.launcher not in _WRITERS:
        raise UsageError(
            f"there are no launch files for {launch.launcher}: choose from "
            f"{', '.join(['local', 'ssh', *_WRITERS])}"
        )
    _check(launch)
    return _WRITERS[launch.launcher](launch, common | {"python": python})


def _check(batch: Batch) -> None:
    if batch.launcher == "kubernetes" and not batch.image:
        raise UsageError("--launcher kubernetes needs --image, the image of the Dockerfile")
    unused: dict[str, dict[str, object]] = {
        "mpi": {"--partition": batch.queue, "--time": batch.time, "--image": batch.image},
        "slurm": {"--image": batch.image},
        "kubernetes": {"--partition": batch.queue, "--submit": batch.options},
    }
    if batch.launcher != "kubernetes":
        unused[batch.launcher]["--kind"] = batch.kind != "job"
    if wrong := [flag for flag, value in unused[batch.launcher].items() if value]:
        raise UsageError(f"{', '.join(wrong)} does not apply to --launcher {batch.launcher}")
    if faults := list(malformed(batch)):
        raise UsageError("; ".join(faults))


def _slurm(batch: Batch, common: dict[str, str]) -> dict[str, str]:
    options = [
        *([f"--partition={batch.queue}"] if batch.queue else []),
        *([f"--time={batch.time}"] if batch.time else []),
        *([f"--gpus-per-node={batch.gpus}"] if batch.gpus else []),
        *batch.options,
    ]
    text = _SBATCH.format(
        name=common["name"],
        hosts=common["count"],
        options="".join(f"#SBATCH {option}\n" for option in options),
        checkpoint=common["checkpoint"],
        notice=NOTICE_S,
        continues=CONTINUES,
    )
    return {"train.sbatch": text}


def _mpi(batch: Batch, common: dict[str, str]) -> dict[str, str]:
    own = "".join(f" {option}" for option in batch.options)
    count, checkpoint = common["count"], common["checkpoint"]
    return {"mpirun.sh": _MPIRUN.format(hosts=count, port=PORT, own=own, checkpoint=checkpoint)}


_WRITERS: dict[str, Callable[[Batch, dict[str, str]], dict[str, str]]] = {
    "slurm": _slurm,
    "mpi": _mpi,
    "kubernetes": kubernetes_files,
}
