"""Attributes of this machine from the metadata server of Google Cloud.

Address, paths and names are those that JAX reads (jax/_src/clusters/cloud_tpu_cluster.py, JAX
0.10.2). nbdist also sends the text of this module to Python on other hosts, so it uses the
standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request

SKIPPED = "TPU_SKIP_MDS_QUERY"
"""Variable with which JAX asks no metadata server. JAX sets it on machines without a TPU."""

NUMBER, ENDPOINTS = "agent-worker-number", "worker-network-endpoints"
ACCELERATOR, ENVIRONMENT = "accelerator-type", "tpu-env"
ATTRIBUTES = (NUMBER, ENDPOINTS, ACCELERATOR, ENVIRONMENT)

FAULT = "fault"
_SERVER_VARIABLE, _SERVER = "GCE_METADATA_IP", "metadata.google.internal"
_ANSWER_S = 5.0
_TRIES, _AGAIN_S = 6, 0.5  # as JAX
_NOT_FOUND = 404


def server() -> str:
    """Return the name or the address of the metadata server."""
    return os.environ.get(_SERVER_VARIABLE, _SERVER)


def attributes() -> dict[str, str]:
    """Return the attributes of this machine. Attributes that it does not have are left out.

    Raises:
        OSError: the metadata server does not respond.
    """
    found = {name: _attribute(name) for name in ATTRIBUTES}
    return {name: value for name, value in found.items() if value is not None}


def _attribute(name: str) -> str | None:
    url = f"http://{server()}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(_TRIES):
        try:
            with direct.open(request, timeout=_ANSWER_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == _NOT_FOUND:
                return None
            if attempt == _TRIES - 1:
                raise
        time.sleep(_AGAIN_S)
    raise AssertionError("unreachable")


def main() -> None:
    """Print the attributes as JSON, or an error under `FAULT`."""
    try:
        found = attributes()
    except OSError as error:
        found = {FAULT: f"Google Cloud's metadata server ({server()}) does not respond: {error}"}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
