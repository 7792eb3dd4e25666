"""Double of an object store: files of a folder under the part of S3's protocol that readers use.

The servers of S3 for Python need another version of python-dateutil than the development tools.
The clients in the tests are PyArrow's and, if it is installed, s3fs, which needs that version too.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "key"
"""Access key of a new store."""


class StoreServer(ThreadingHTTPServer):
    """Server of objects on the loopback interface, in a thread.

    Args:
        handler: handler of requests.

    Attributes:
        address: host and port.
        key: access key or token that requests must have.
        sent_bytes: bytes of objects that were sent.
    """

    daemon_threads = True

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)  # type: ignore[arg-type]
        self.key = KEY
        self.sent_bytes = 0
        self.address = f"127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the server."""
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class ObjectStore(StoreServer):
    """Server of a folder whose subfolders are buckets.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(_Handler)


class StoreHandler(BaseHTTPRequestHandler):
    """Handler of requests that sends objects, or ranges of them. It logs nothing."""

    server: StoreServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def send_object(self, content: bytes, headers: dict[str, str]) -> None:
        """Send the content of an object, or the range that the request wants."""
        status = 200
        if wanted := self.headers.get("Range"):
            size = len(content)
            first, last = wanted.removeprefix("bytes=").split("-")
            content, status = content[int(first) : int(last or size - 1) + 1], 206
            headers = {**headers, "Content-Range": f"bytes {first}-{last or size - 1}/{size}"}
        if self.command == "GET":
            self.server.sent_bytes += len(content)
        self.send(status, content, headers)

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        """Send an answer; to `HEAD` requests without its content."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


class _Handler(StoreHandler):
    server: ObjectStore

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = self.server.root / url.path.strip("/"), parse_qs(url.query)
        if f"Credential={self.server.key}/" not in self.headers.get("Authorization", ""):
            self.send(403, _error("AccessDenied"), {})
        elif "list-type" in query:
            prefix, delimiter = (query.get(key, [""])[0] for key in ("prefix", "delimiter"))
            self.send(200, _listing(path, prefix, delimiter), {})
        elif path.is_file():
            self.send_object(path.read_bytes(), {})
        else:
            self.send(404, _error("NoSuchKey"), {})


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing(bucket: Path, prefix: str, delimiter: str) -> bytes:
    """Return the objects of a bucket whose keys begin with the prefix, as S3 lists them."""
    objects, folders = [], set()
    for file in sorted(bucket.rglob("*")):
        key = str(file.relative_to(bucket))
        if not file.is_file() or not key.startswith(prefix):
            continue
        first, found, _ = key.removeprefix(prefix).partition(delimiter or "\n")
        if found:
            folders.add(f"{prefix}{first}{delimiter}")
            continue
        objects.append(
            f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    objects += [
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        for folder in sorted(folders)
    ]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket.name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(objects)}"
        f"</KeyCount><IsTruncated>false</IsTruncated>{''.join(objects)}</ListBucketResult>"
    ).encode()
