"""Fixtures of the tests in a browser; a module takes them with ``pytest_plugins = ["browser_fixtures"]``.

Without a browser the tests are skipped, or fail with ``DFLASH_REQUIRE_BROWSER=1``. Pictures of the main states go to
the folder ``DFLASH_SCREENSHOTS``, or to pytest's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import READY, SMALL, WIDE, Site, started, watch


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    running = started()
    try:
        browser = running.__enter__()
    except RuntimeError as error:
        if os.environ.get("DFLASH_REQUIRE_BROWSER") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield browser
    running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The server of all tests, with a small pair that answers at once."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    pytest.importorskip("torch")
    pytest.importorskip("gradio")
    from demo_pairs import write_pair

    folder = tmp_path_factory.mktemp("small-pair")
    write_pair(folder)
    site = Site(folder)
    site.studio.load(SMALL)
    yield site
    site.close()


@contextmanager
def visits(browser: Any) -> Iterator[Callable[..., Any]]:
    """``visit(url, viewport=…, …)`` opens a page in a browser profile of its own; the options are Playwright's for a
    context. At the end, nothing bad may have happened on any page."""
    contexts: list[Any] = []
    faults: list[str] = []

    def visit(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light", **options})
        context.set_default_timeout(READY)
        contexts.append(context)
        page = context.new_page()
        watch(page, faults)
        page.goto(url)
        if url.startswith("http"):
            page.wait_for_selector("#dflash-generate")
            page.wait_for_selector(".player .empty")
        return page

    try:
        yield visit
    finally:
        seen = list(faults)  # what comes of closing is nobody's fault
        for context in contexts:
            context.close()
    assert not seen, "\n".join(seen)


@pytest.fixture
def visit(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    with visits(chromium) as open_page:
        yield open_page
        if "site" in request.fixturenames:
            request.getfixturevalue("site").pause = 0.0


@pytest.fixture(scope="session")
def shoot(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """``shoot(page, name)`` keeps a picture of the page."""
    named = os.environ.get("DFLASH_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    return lambda page, name, **options: page.screenshot(path=folder / f"{name}.png", **{"full_page": True, **options})
