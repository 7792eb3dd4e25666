"""MkDocs hook that adds the README, the notebooks and other pages of the root to the site.

`mkdocs.yml` names this file. The pages keep one source each: links that work on GitHub are
rewritten to pages of the site.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md"}
FROM_ROOT |= {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
FROM_ROOT |= {"SECURITY.md": "security_policy.md"}
_DOCS = re.compile(r"\]\(docs/")
_NOTEBOOK = re.compile(r"\]\((?:\.\./)?notebooks/(\w+)\.ipynb")
_ROOT_PAGE = re.compile(rf"\]\((?:\.\./)?({'|'.join(map(re.escape, FROM_ROOT))})")
_CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code in a table. GitHub needs a backslash before the bar, and Python-Markdown would show it."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add generated pages to those of `docs/`."""
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, page, content=_as_markdown(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository as links to pages of the site."""
    del config, files
    up = "../" if page.file.src_uri.startswith("notebooks/") else ""
    text = _DOCS.sub(f"]({up}", markdown)
    text = _NOTEBOOK.sub(rf"]({up}notebooks/\1.md", text)
    text = _CODE_WITH_BAR.sub(_as_html, text)
    return _ROOT_PAGE.sub(lambda found: f"]({up}{FROM_ROOT[found[1]]}", text)


def _as_html(code: re.Match[str]) -> str:
    text = html.escape(code[1]).replace("\\|", "&#124;")
    return f"<code>{text}</code>"


def _as_markdown(path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    return MarkdownExporter().from_notebook_node(notebook)[0]
