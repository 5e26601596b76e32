"""One browser and one server for all tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.server.page.browser import Browser, Page
from tests.server.page.models import write
from tests.server.page.site import Site
from tests.server.running import running


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with every kind of model for the page. Tests may add others."""
    return write(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def site(repository: Path) -> Iterator[Site]:
    """Run a server with these models, whose clients may load and unload."""
    with running(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        yield Site(server)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open tabs of a given size, and close them at the end."""
    pages: list[Page] = []

    def opened(url: str, width: int = 1200, height: int = 900, *, dark: bool = False) -> Page:
        page = Page(browser, width, height, dark=dark)
        pages.append(page)
        page.goto(url)
        return page

    yield opened
    for page in pages:
        page.close()
