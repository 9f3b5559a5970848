"""A headless browser for the tests of the demo, and the README's pictures of it.

The browser is the one that ``DFLASH_BROWSER`` names, else Chromium or Chrome of this machine, else Playwright's own.
The fixtures of the tests stand in ``browser_fixtures``.

  python tests/demo/browser.py docs/images     makes the README's pictures, with the bundled pair
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    from playwright.sync_api import expect
except ImportError:  # ``started`` tells
    expect: Any = None  # type: ignore[no-redef]

WIDE, PHONE = {"width": 1400, "height": 1000}, {"width": 375, "height": 740}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
READY = 20_000  # ms until a page of the server stands, on a busy machine
SMALL = "small"  # the pair that recites; see ``demo_pairs``
QUESTION = "What does Tom have?"  # the small pair answers it with ``demo_pairs.STORY``
PICTURED = "Write a Python function that merges two sorted lists into one."  # in the README
PLAYER = ".dflash.player >> visible=true"


def find_browser() -> str | None:
    """The browser to start; None leaves it to Playwright."""
    return os.environ.get("DFLASH_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def started() -> Iterator[Any]:
    """A running browser. Raises ``RuntimeError`` where there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise RuntimeError(f"a test in a browser needs Playwright ({error})") from None
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=find_browser(), args=ARGUMENTS)
        except Error as error:
            reason = str(error).strip().splitlines()[0]
            raise RuntimeError(f"no browser could be started; DFLASH_BROWSER names one ({reason})") from None
        try:
            yield browser
        finally:
            browser.close()


class Site:
    """The demo, served by this process at ``url``. Each round waits ``pause`` seconds, so that a run can be met in
    the middle. ``small`` is the default pair where there is one."""

    def __init__(self, small: Path | None = None) -> None:
        from gradio_dflash.app import launch_options, make_app
        from gradio_dflash.studio import Studio

        self.pause = 0.0
        named = {SMALL: {"target": str(small / "target"), "draft": str(small / "draft")}} if small else {}
        site = self

        class PacedStudio(Studio):
            def load(self, pair: str, backend: str = "auto") -> Any:
                engine = super().load(pair, backend)
                drafter: Any = engine.drafter
                if not hasattr(drafter, "unpaced"):
                    drafter.unpaced = drafter.propose
                    drafter.propose = lambda *given, **more: (time.sleep(site.pause), drafter.unpaced(*given, **more))[
                        1
                    ]
                return engine

        self.studio = PacedStudio({"device": "cpu"}, named)
        self._app = make_app(self.studio)
        _, self.url, _ = self._app.launch(
            server_name="127.0.0.1", server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options()
        )

    def close(self) -> None:
        self._app.close(verbose=False)

    @property
    def answer(self) -> Any:
        """The newest answer of any visitor."""
        return list(self.studio._answers.values())[-1]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def watch(page: Any, faults: list[str]) -> None:
    """Write down what must not happen on a page: errors and warnings in its console, exceptions, failed requests, and
    any request that leaves this machine."""

    def said(message: Any) -> None:
        theirs = "/assets/" in message.location.get("url", "")  # Gradio's scripts; the demo's stand in the page itself
        if message.type == "error" or (message.type == "warning" and not theirs):
            faults.append(f"console {message.type}: {message.text}")

    def failed(request: Any) -> None:
        if "/queue/data" not in request.url:  # Gradio ends its stream by itself
            faults.append(f"failed: {request.url} {request.failure}")

    def asked(request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            faults.append(f"request to elsewhere: {request.url}")

    page.on("console", said)
    page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    page.on("requestfailed", failed)
    page.on("request", asked)
    page.on("websocket", lambda socket: faults.append(f"websocket: {socket.url}"))


# What tests and pictures do on a page ---------------------------------------------------------------------------------


def generate(page: Any, prompt: str, *, wait: bool = True) -> None:
    """Ask for an answer, and wait for its first token, or for its end."""
    page.fill("#dflash-prompt textarea", prompt)
    text = f"{PLAYER} >> .written .stretch"
    page.locator(text).evaluate_all("(all) => all.forEach((it) => (it.dataset.old = ''))")
    page.click("#dflash-generate")
    page.wait_for_selector(f"{text}:not([data-old]) >> .token >> nth=0", timeout=90_000)
    if wait:
        page.wait_for_selector(f"{PLAYER} >> .status[data-kind=ended]", timeout=90_000)


def open_tab(page: Any, name: str) -> None:
    """Also where a narrow window has put the tab into the menu."""
    tab = page.get_by_role("tab", name=name)
    if tab.count():
        tab.click()
    else:
        page.locator(".overflow-menu > button").click()
        page.locator(".overflow-dropdown button", has_text=name).click()


def choose(page: Any, control: str, value: str) -> None:
    """Choose an entry of one of the dropdowns under Settings, which are opened if need be."""
    if not page.is_visible(f"#{control}"):
        page.get_by_role("button", name="Settings").first.click()
    page.click(f"#{control} input")
    page.get_by_role("option", name=value, exact=True).click()


def race(page: Any) -> None:
    """Run a race to its end, and the replay of it too."""
    open_tab(page, "Race")
    page.click("#dflash-race-start")
    page.wait_for_selector(".race .lanes", timeout=120_000)
    page.get_by_role("button", name="to the end", exact=True).click()
    page.wait_for_selector(".race .result")


def look_inside(page: Any) -> None:
    open_tab(page, "Conditioning")
    page.click("#dflash-look")
    page.wait_for_selector(".conditioning .attention", timeout=90_000)


# The README's pictures ------------------------------------------------------------------------------------------------


def picture(page: Any, path: Path, last: str) -> None:
    """The page down to the end of the element ``last``."""
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement && document.activeElement.blur()")
    page.wait_for_timeout(600)  # until what fades has faded
    bottom = page.evaluate(
        "(last) => [...document.querySelectorAll(last)].pop().getBoundingClientRect().bottom + scrollY", last
    )
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": WIDE["width"], "height": bottom + 10})


def main(folder: Path) -> None:
    """``demo-watch.png`` and ``demo-race.png`` of the bundled pair, 1,400 pixels wide."""
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1")
    folder.mkdir(parents=True, exist_ok=True)
    site = Site()
    with started() as browser:
        page = browser.new_page(viewport=WIDE, color_scheme="light")
        page.goto(site.url)
        page.wait_for_selector(".player .empty")
        generate(page, PICTURED)
        page.wait_for_selector("#dflash-trace-file:not([disabled])")
        best = max(
            (step for step in site.answer.trace.steps if step.next_kind == "correction"), key=lambda s: s.accepted
        )
        page.click(f".timeline .bar[data-place='{best.index}']")
        page.wait_for_timeout(400)
        picture(page, folder / "demo-watch.png", ".player .panel.timeline")
        race(page)
        picture(page, folder / "demo-race.png", ".race .result")
    site.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
