"""Four engines of nbdist, and four of ipyparallel, in one notebook kernel."""

START = """
import logging, time, ipyparallel as ipp
%load_ext nbdist
%dist_start 4 --framework jax
peer = ipp.Cluster(n=4, log_level=logging.ERROR)
client = peer.start_and_connect_sync()
view = client[:]
view.block = True
view.activate()
from IPython import get_ipython
def ours(cell):
    start = time.perf_counter()
    get_ipython().run_cell_magic("dist_run", "", cell)
    return time.perf_counter() - start
def theirs(cell):
    start = time.perf_counter()
    get_ipython().run_cell_magic("px", "", cell)
    return time.perf_counter() - start
"""

STOP = "%dist_stop\nclient.close()\npeer.stop_cluster_sync()"
