"""What a cluster's owner leaves to its successor, and how that takes it up."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from jupyter_core.paths import jupyter_runtime_dir

from nbdist.cluster.handover import read_estate
from nbdist.errors import StartError
from nbdist.records import Estate
from nbdist.utils.processes import is_gone, process_of, this_process

if TYPE_CHECKING:
    from nbdist.cluster.worker_group import Crew
    from nbdist.records import ClusterRequest


def clusters_folder() -> Path:
    """Where each cluster of this user has a folder."""
    return Path(jupyter_runtime_dir()) / "nbdist"


def new_folder() -> Path:
    """A folder for one cluster, open to this user only."""
    folder = clusters_folder() / secrets.token_hex(6)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "log").mkdir(mode=0o700)
    (folder / "security").mkdir(mode=0o700)
    return folder


def new_estate(folder: Path, request: ClusterRequest, crew: Crew) -> Estate:
    """Of a cluster that is about to be started."""
    return Estate(
        id=folder.name,
        request=request,
        owner=this_process(),
        stream=crew.receiver.door,
        dispatch=crew.dispatcher.door,
    )


def of_crew(crew: Crew) -> dict[str, object]:
    """What of the estate is another whenever engines, or their collectives, are."""
    return {
        "hellos": tuple(crew.hellos[rank] for rank in sorted(crew.hellos)),
        "books": crew.engines.books(),
        "collectives": crew.collectives.books(),
    }


def controllers_of(crew: Crew) -> dict[str, object]:
    """What of the estate is another after each start."""
    pids = crew.engines.controller.pids
    return {"controllers": tuple(filter(None, map(process_of, pids)))}


def inherit(folder: Path, *, keeper: bool) -> Estate:
    """What the former owner left, with this process as the owner.

    Raises:
        StartError: it cannot be read, or the cluster had not been started yet.
    """
    try:
        estate = read_estate(folder)
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(
            f"the cluster in {folder} cannot be taken over ({error}): type %dist_stop --all"
        ) from None
    if not estate.hellos:
        raise StartError(
            f"the cluster in {folder} had not been started when its notebook ended: "
            "type %dist_stop --all"
        )
    return msgspec.structs.replace(estate, owner=this_process(), keeper=keeper)


def take_up(estate: Estate, crew: Crew) -> None:
    """Use the processes that there are, each only if it is the very one."""
    controllers = [process.pid for process in estate.controllers if not is_gone(process)]
    there = bool(estate.controllers) and not is_gone(estate.controllers[0])
    crew.hellos = {hello.rank: hello for hello in estate.hellos}
    crew.engines.take_over(estate.books, controllers, answers=there)
    crew.collectives.take_over(estate.collectives)
    if estate.cell is not None and estate.cell.detached:
        crew.detach(on=True)
