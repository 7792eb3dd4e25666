"""Freed memory stays in a worker's process during a cell, without new page faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import nbdist

pytestmark = pytest.mark.processes

BLOCK = 512 << 20
PAGES = BLOCK // 4096

FAULTS = f"""
import resource
import threading
import psutil

def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray({BLOCK})  # NumPy asks Linux for huge pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_a_thread(of):
    found = []
    thread = threading.Thread(target=lambda: found.append(of()))
    thread.start()
    thread.join()
    return found[0]

def process_bytes():
    return psutil.Process().memory_info().rss
"""

PROGRAM = f"""
import json
from nbdist.utils.allocator import keep_freed_memory, return_freed_memory
keep_freed_memory()
{FAULTS}
first, again = faults_of_a_block(), faults_of_a_block()
others = [in_a_thread(faults_of_a_block) for _ in range(2)]
kept = process_bytes()
return_freed_memory()
print(json.dumps([first, again, max(others), kept - process_bytes()]))
"""


def measured(**env: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, check=True, timeout=60
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_freed_blocks_are_used_again_without_page_faults_by_all_threads() -> None:
    first, again, others, returned = measured()
    assert first > 0.9 * PAGES > 20 * max(again, others)
    assert returned > BLOCK // 2


def test_configuration_by_the_user_is_kept() -> None:
    _, again, *_ = measured(MALLOC_TRIM_THRESHOLD_="1000000")
    assert again > 0.9 * PAGES


def test_engine_keeps_freed_memory_until_the_end_of_the_cell(cluster: nbdist.Cluster) -> None:
    cluster.run(
        f"{FAULTS}\nfaults_of_a_block()\nagain, kept = faults_of_a_block(), process_bytes()"
    )
    cluster.run("returned = kept - process_bytes()")
    for found in cluster.pull(["again", "returned"]).values():
        assert found["again"] < PAGES // 20
        assert found["returned"] > BLOCK // 2
