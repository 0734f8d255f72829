"""Draws the pictures of the page in docs/, from real answers of the demo: `python -m tests.page_pictures`."""

from __future__ import annotations

from pathlib import Path

from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec
from tests.browser import chromium, until, visiting

DOCS = Path(__file__).parents[1] / "docs"
STORY = "One day, a curious fox met a turtle who was carrying a heavy bag."
CODE = 'def read_lines(path):\n    """Return the lines of a text file as a list."""\n'
SAMPLED = {"temperature": "0.7", "seed": "3"}
"""greedy answers of so small a target soon repeat themselves"""


def main() -> None:
    """Write docs/page-compare.png (light) and docs/page-tree.png (dark)."""
    spec = StackSpec.demo(dtype="float32", http_port=0, verifier_threads=1, drafter_threads=1)
    with Stack(spec) as stack, chromium() as browser:
        address = f"http://{stack.orchestrator.http}/"
        wide = {"viewport": {"width": 1280, "height": 820}, "device_scale_factor": 1.5}
        with visiting(browser, f"{address}#compare", color_scheme="light", **wide) as page:
            page.locator("#model:not(:empty)").wait_for()
            for name, value in {"prompt": STORY, **SAMPLED}.items():
                page.locator(f"#race [name={name}]").fill(value)
            page.get_by_role("button", name="Compare").click()
            page.locator("#verdict:not(:empty)").wait_for()
            page.screenshot(path=DOCS / "page-compare.png", full_page=True)
        with visiting(browser, address, color_scheme="dark", **wide) as page:
            page.locator("#model:not(:empty)").wait_for()
            for name, value in {"prompt": CODE, **SAMPLED}.items():
                page.locator(f"#ask [name={name}]").fill(value)
            page.locator("#ask [name=policy]").select_option("merge")
            page.get_by_role("button", name="Generate").click()
            until(page, "shown.finished")
            best = "shown.steps.reduce((best, step, at) => (step.taken > shown.steps[best].taken ? at : best), 0)"
            page.evaluate(f"player.go({best})")
            page.wait_for_timeout(1000)  # until the tree has grown
            page.screenshot(path=DOCS / "page-tree.png", full_page=True)


if __name__ == "__main__":
    main()
