"""One JupyterLab and one browser for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import Lab, browser, change_theme, chromium

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from playwright.sync_api import BrowserContext, Page

NO_BROWSER = "no Chromium on the path: `apt-get install chromium`, or any package that brings it"


@pytest.fixture(autouse=True, scope="package")
def require_browser() -> None:
    if chromium() is None:
        pytest.skip(NO_BROWSER)


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab") / "files") as running:
        yield running


@pytest.fixture(scope="module")
def lab(shared_lab: Lab) -> Iterator[Lab]:
    """Provide the shared JupyterLab without kernels."""
    yield shared_lab
    shared_lab.end_kernels()


@pytest.fixture(scope="package")
def window() -> Iterator[BrowserContext]:
    """Provide one browser for all modules. Its cache contains JupyterLab's compiled scripts."""
    with browser() as opened:
        yield opened


@pytest.fixture
def page(window: BrowserContext) -> Iterator[Page]:
    opened = window.new_page()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def themes(request: pytest.FixtureRequest) -> Sequence[str]:
    """Return the themes in which tests check colours. `--full` adds the default one."""
    is_full = request.config.getoption("--full")
    return ("JupyterLab Dark", "JupyterLab Light") if is_full else ("JupyterLab Dark",)


@pytest.fixture(scope="session")
def photograph(pictures: Path, themes: Sequence[str]) -> Callable[[Page, str], None]:
    """Take screenshots in all themes and two sizes. People review them."""

    def take(page: Page, name: str) -> None:
        for theme in themes:
            change_theme(page, theme)
            page.screenshot(path=pictures / f"{name}-{theme.split()[1].lower()}.png")
        page.set_viewport_size({"width": 1000, "height": 700})
        page.screenshot(path=pictures / f"{name}-small.png")
        page.set_viewport_size({"width": 1400, "height": 900})

    return take


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Return the folder of screenshots, `build/pictures`. People review them."""
    folder = Path(__file__).parents[2] / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
