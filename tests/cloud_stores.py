"""Local servers for the clients of Google Cloud Storage (`gs://`) and of the Hugging Face Hub.

The store of Google is the emulator gcp-storage-emulator behind a check of tokens. The Hub is a
double: it serves the part of the Hub's protocol that readers of one data set use.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import gcsfs.core
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

from tests.object_store import StoreHandler, StoreServer

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

REPO = "user/numbers"
"""Name of the data set that the Hub serves."""

_COMMIT = "0" * 40


class GoogleStorage(StoreServer):
    """Google Cloud Storage in memory, with the bucket `bucket`. Writing needs no token.

    Attributes:
        environment: environment variables of its clients. The emulator has no gRPC, which gcsfs
            uses to ask for the kind of a bucket.
    """

    def __init__(self) -> None:
        storage = Storage(use_memory_fs=True)
        create_bucket("bucket", storage)
        self._storage = storage
        super().__init__(partial(_GoogleHandler, storage))
        self.environment = {
            "STORAGE_EMULATOR_HOST": f"http://{self.address}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def put(self, folder: Path) -> None:
        """Copy a folder into the bucket."""
        files = gcsfs.core.GCSFileSystem(
            token="anon", endpoint_url=f"http://{self.address}", skip_instance_cache=True
        )
        for file in folder.rglob("*"):
            if file.is_file():
                files.pipe_file(f"bucket/{file.relative_to(folder)}", file.read_bytes())

    def remove(self, name: str) -> None:
        """Remove an object of the bucket."""
        self._storage.delete_file("bucket", name)


class _GoogleHandler(RequestHandler):  # type: ignore[misc]
    server: StoreServer

    def do_GET(self) -> None:  # noqa: N802
        if self.headers.get("Authorization", "") == f"Bearer {self.server.key}":
            super().do_GET()
        else:
            _deny(self, "the account has no storage.objects.get access")

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length" and "alt=media" in self.path and self.command == "GET":
            self.server.sent_bytes += int(value)
        super().send_header(keyword, value)


class Hub(StoreServer):
    """Double of the Hugging Face Hub with one private data set `REPO`.

    Args:
        root: the files of the data set.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(_HubHandler)

    def names(self) -> list[str]:
        """Return the paths of the files in the data set."""
        files = sorted(self.root.rglob("*"))
        return [str(file.relative_to(self.root)) for file in files if file.is_file()]


class _HubHandler(StoreHandler):
    server: Hub

    def do_HEAD(self) -> None:  # noqa: N802
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {self.server.key}":
            code = "RepoNotFound" if path.startswith(f"/api/datasets/{REPO}") else "GatedRepo"
            self.send(401, b"{}", {"X-Error-Code": code})
        elif path.startswith(f"/api/datasets/{REPO}/tree/"):
            folder = path.removeprefix(f"/api/datasets/{REPO}/tree/").partition("/")[2]
            self._send_tree(folder)
        elif path in (f"/api/datasets/{REPO}", f"/api/datasets/{REPO}/revision/main") or (
            path == f"/api/datasets/{REPO}/revision/{_COMMIT}"
        ):
            files = [{"rfilename": name} for name in self.server.names()]
            self._answer({"id": REPO, "sha": _COMMIT, "private": True, "siblings": files})
        elif path.startswith(f"/datasets/{REPO}/resolve/"):
            name = path.removeprefix(f"/datasets/{REPO}/resolve/").partition("/")[2]
            self._send_file(name)
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_tree(self, folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        names = [name for name in self.server.names() if name.startswith(prefix)]
        if folder and not names:
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        entries = {}
        for name in names:
            first, inside, _ = name.removeprefix(prefix).partition("/")
            if inside and "recursive=true" not in self.path:
                entries[first] = {"type": "directory", "path": prefix + first, "oid": _COMMIT}
            else:
                entries[name] = _entry(self.server.root, name)
        self._answer(list(entries.values()))

    def _send_file(self, name: str) -> None:
        if name not in self.server.names():
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = (self.server.root / name).read_bytes()
        self.send_object(content, {"X-Repo-Commit": _COMMIT, "ETag": f'"{_digest(content)}"'})

    def _answer(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _entry(root: Path, name: str) -> dict[str, Any]:
    content = (root / name).read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _deny(handler: BaseHTTPRequestHandler, message: str) -> None:
    content = json.dumps({"error": {"code": 403, "message": message}}).encode()
    handler.send_response(403)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
