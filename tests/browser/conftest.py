"""A headless Chromium for this folder's tests, or a skip that says what is missing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed when the module is done: the driver keeps an event loop in this thread, where others run theirs."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """What a test's page did that it must not, noted by whoever opens it; there must be nothing."""
    complaints: list[str] = []
    yield complaints
    assert complaints == []


@pytest.fixture
def watched(complaints: list[str]) -> Callable[[Any], Any]:
    """Lets a tab's errors and warnings be complaints. What else a console is told is Chromium's talk to developers."""

    def watch(tab: Any) -> Any:
        tab.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        return tab

    return watch
