"""`python -m tests.web.screenshots RUN FOLDER`: every page of a run as a PNG, in both themes.

Four of them are in pipeline/web/screenshots and in the README.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.web.serving import serving

PAGES = ("graph", "timeline", "staleness", "metrics", "samples")
SETTLE_MS = 2500


def main(run: Path, folder: Path) -> None:
    """Take the screenshots."""
    from playwright.sync_api import sync_playwright

    with serving(run) as served, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=theme)
            page.goto(served.address.partition("#")[0])
            for name in PAGES:
                page.goto(f"{served.address.partition('?')[0]}#/{run.resolve().name}/{name}")
                page.wait_for_timeout(SETTLE_MS)
                if name == "samples":  # an early step with uncertain tokens
                    page.select_option("#step", index=2)
                    page.click("text=Shade unlikely tokens")
                    page.wait_for_timeout(SETTLE_MS)
                page.screenshot(path=folder / f"{name}-{theme}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
