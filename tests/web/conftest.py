"""The browser of these tests: Debian's Chromium, driven by Playwright."""

import shutil

import pytest

from tests.optional import need, required


@pytest.fixture(scope="module")  # its event loop must not leak into other tests
def browser():
    sync = need("browser", "playwright.sync_api")
    need("browser", "axe_playwright_python")
    chromium = shutil.which("chromium")
    if chromium is None:
        required("browser", "chromium")
    with sync.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
