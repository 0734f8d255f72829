"""Draws the pictures of the page in docs/, from a real answer of the demo: `python -m tests.page_pictures`."""

from __future__ import annotations

from pathlib import Path

from coppice.stack.launch import Stack
from tests.browser import chromium, page_stack, until, visiting

DOCS = Path(__file__).parents[1] / "docs"
PROMPT = "def mean(values):\n    "


def main() -> None:
    """Write docs/page-compare.png (light) and docs/page-tree.png (dark)."""
    with Stack(page_stack()) as stack, chromium() as browser:
        address = f"http://{stack.orchestrator.http}/"
        wide = {"viewport": {"width": 1280, "height": 820}, "device_scale_factor": 1.5}
        with visiting(browser, f"{address}#compare", color_scheme="light", **wide) as page:
            page.locator("#model:not(:empty)").wait_for()
            page.locator("#race [name=prompt]").fill(PROMPT)
            page.locator("#race [name=temperature]").fill("0.7")
            page.get_by_role("button", name="Compare").click()
            page.locator("#verdict:not(:empty)").wait_for()
            page.screenshot(path=DOCS / "page-compare.png")
        with visiting(browser, address, color_scheme="dark", **wide) as page:
            page.locator("#model:not(:empty)").wait_for()
            page.locator("#ask [name=prompt]").fill(PROMPT)
            page.locator("#ask [name=temperature]").fill("0")
            page.locator("#ask [name=policy]").select_option("merge-dedup")
            page.get_by_role("button", name="Generate").click()
            until(page, "shown.finished")
            best = "shown.steps.reduce((best, step, at) => (step.taken > shown.steps[best].taken ? at : best), 0)"
            page.evaluate(f"player.go({best})")
            page.wait_for_timeout(1000)  # until the tree has grown
            page.locator("main").screenshot(path=DOCS / "page-tree.png")


if __name__ == "__main__":
    main()
