"""A browser for the tests of pages, and where their screenshots go."""

from pathlib import Path

import pytest

from tests.browser.chromium import Browser, executable

SCREENSHOTS = Path(__file__).parents[2] / "results" / "screenshots"


@pytest.fixture(scope="session")
def browser():
    if executable() is None:
        pytest.skip("no chromium: apt-get install --no-install-recommends chromium")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """results/screenshots: for a person to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS
