"""The page in a real Chromium: what tests and the pictures of docs/ begin with."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""where the system's Chromium is, if there is one"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A page of its own at an address. Raises AssertionError for errors of the page, and requests to elsewhere."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # Chromium calls a stream that was read to its end aborted.
    page.on("requestfailed", lambda one: None if "ERR_ABORTED" in (one.failure or "") else wrong.append(one.url))
    page.on("request", lambda one: None if one.url.startswith((origin_of(address), "blob:")) else wrong.append(one.url))
    page.goto(address)
    yield page
    context.close()
    assert not wrong, wrong


def until(page: Page, expression: str, within_s: float = 60.0) -> None:
    """Wait until an expression is true on a page. Its policy forbids the polling that playwright brings along."""
    end = time.monotonic() + within_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def origin_of(address: str) -> str:
    """What the addresses of a site begin with; of a file its folder."""
    return address.rpartition("/")[0]
