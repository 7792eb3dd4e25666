"""Documents and example notebooks of the installed version, for the browser."""

from __future__ import annotations

import asyncio
import re
from html import escape
from pathlib import Path

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from nbconvert.filters.markdown_mistune import markdown2html_mistune
from tornado.web import HTTPError, authenticated

PACKAGE = Path(__file__).parents[1]
EXAMPLES = PACKAGE / "examples"

_PAGE = re.compile(r"(docs/[a-z_]+|README|ARCHITECTURE|CONTRIBUTING|CHANGELOG|SECURITY)\.md")
_PICTURE = re.compile(r"docs/images/[a-z-]+\.png")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; margin: 2em auto; max-width: 50em; padding: 0 1em; }
img { max-width: 100%; }
.anchor-link { display: none; }
pre { overflow: auto; padding: .8em; background: color-mix(in srgb, canvastext 7%, canvas); }
code { font-size: .9em; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid; padding: .3em .8em .3em 0; text-align: start; }
th, td { vertical-align: top; }
"""


class ExampleHandler(APIHandler):
    """`GET examples/<framework>`: the example notebook of a framework, as JSON."""

    auth_resource = "nbdist"

    @authenticated
    @authorized
    async def get(self, framework: str) -> None:
        if framework not in ("tensorflow", "jax"):
            raise HTTPError(404, "no such example")
        await self.finish((EXAMPLES / f"{framework}.ipynb").read_bytes())


class DocumentHandler(APIHandler):
    """`GET documents/docs/runs.md`: a document as a page, or a picture of a document."""

    auth_resource = "nbdist"

    @property
    def content_security_policy(self) -> str:
        """The policy of the page: inline styles and pictures are allowed, scripts are not."""
        return f"{super().content_security_policy}; style-src 'unsafe-inline'; img-src 'self'"

    @authenticated
    @authorized
    async def get(self, name: str) -> None:
        is_page = bool(_PAGE.fullmatch(name))
        path = documents() / name
        if not (is_page or _PICTURE.fullmatch(name)) or not path.is_file():
            raise HTTPError(404, "no such document")
        content = await asyncio.to_thread(path.read_bytes)
        if is_page:
            page = html(content.decode("utf-8"))
            await self.finish(page, set_content_type="text/html; charset=utf-8")
        else:
            await self.finish(content, set_content_type="image/png")


def documents() -> Path:
    """Return the folder of `README.md` and `docs/`: in the package, or the source tree."""
    installed = PACKAGE / "documents"
    return installed if installed.is_dir() else PACKAGE.parent


def html(markdown: str) -> str:
    """Return a document as an HTML page."""
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    head = f"<title>{escape(title[1] if title else 'nbdist')}</title><style>{_STYLE}</style>"
    body = markdown2html_mistune(markdown)
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{head}<main>{body}</main></html>'
