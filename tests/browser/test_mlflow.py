"""MLflow's pages on a finished experiment, as a person sees them who did not run it."""

import json
from types import SimpleNamespace

import pytest

import pat.report
from pat import tracking
from tests import mlflow_server
from tests.synthetic import write_experiment

STAGES = ("hardware", "assets", "profile", "predictor", "train-tp1", "train-tp2", "train-pat", "report")
SECONDS = {"tp1": (61.0, 52.0, 55.0), "tp2": (47.0, 41.5, 40.0), "pat": (45.0, 36.0, 35.0)}
# MLflow asks whether it has users, which a plain server answers by 404; and its charts let the browser say this.
HARMLESS = ("users/current", "ResizeObserver loop")


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """A server on the database of a tracked experiment; url, and the run of each stage."""
    folder = tmp_path_factory.mktemp("results")
    directory = write_experiment(folder / "made-up-for-a-test", SECONDS)
    pat.report.run(directory, "Made up for a test", directory / "report")
    target = SimpleNamespace(uri=f"sqlite:///{folder}/mlflow.db", artifacts=str(folder / "mlartifacts"))
    runs = {}
    for stage in STAGES:
        out = directory / "tracking" / f"{stage}.json"
        tracking.run(directory, stage, target, {"seed": 0}, out)
        runs[stage] = json.loads(out.read_text())
    place = (folder / "mlflow.db", folder / "mlartifacts")
    with mlflow_server.running(folder / "server", mlflow_server.free_port(), *place) as url:
        yield SimpleNamespace(url=url, runs=runs, experiment=runs["report"]["experiment_id"], name=directory.name)


@pytest.fixture
def page(browser, mlflow):
    """Opens one of MLflow's pages, in the mode that it has for training, without its assistant."""

    def open_page(path):
        browser.resize(1500, 1300)
        browser.open(f"{mlflow.url}/#/{path}{'&' if '?' in path else '?'}workflowType=machine_learning")
        browser.wait_for("document.querySelector('main, [role=main], h1, h2') !== null")
        close = "[...document.querySelectorAll('button')].filter(each => /close/i.test(each.ariaLabel))"
        browser.evaluate(f"{close}.forEach(each => each.click())")
        return browser

    return open_page


def says(browser, *words):
    """Waits until all of the words are on the page."""
    for each in words:
        browser.wait_for(f"document.body.innerText.includes({json.dumps(each)})", seconds=60)


def problems(browser):
    return [each for each in browser.problems if not any(words in each for words in HARMLESS)]


def test_the_link_of_the_report_finds_the_experiment(page, mlflow):
    browser = page(f"experiments?experimentSearchFilter={mlflow.name}")
    says(browser, mlflow.name, "pat fastest, 12.9 % ahead of tp2")
    assert problems(browser) == []


def test_charts_compare_the_arms(page, mlflow, screenshots):
    browser = page(f"experiments/{mlflow.experiment}/runs?compareRunsMode=CHART")
    says(browser, "pat fastest, 12.9 % ahead of tp2", "gen/median_seconds", "gen/seconds", "gen/tokens_per_s")
    bars = "[...document.querySelectorAll('.bars .point path')].map(each => getComputedStyle(each).fill)"
    colours = [(209, 73, 91), (46, 111, 158), (141, 153, 174)]  # pat, tp2, tp1 as in the report
    for colour in colours:
        browser.wait_for(f"{bars}.includes('rgb{colour}')")
    says(browser, *(f"train-{arm}" for arm in SECONDS), "overview")
    browser.screenshot(screenshots / "mlflow.png")
    assert problems(browser) == []


def test_the_overview_says_at_once_which_arm_won(page, mlflow, screenshots):
    run = mlflow.runs["report"]["run_id"]
    browser = page(f"experiments/{mlflow.experiment}/runs/{run}")
    says(
        browser,
        "overview: pat fastest, 12.9 % ahead of tp2",
        "Generation takes 35.5 s with pat",
        "overview/gen_seconds.tp1",
    )
    figure = browser.wait_for("[...document.images].map(i => i.src).find(src => src.includes('headline.png'))")
    assert f"run_uuid={run}" in figure
    assert browser.wait_for("[...document.images].find(i => i.src.includes('headline.png')).naturalWidth") > 500
    browser.evaluate("[...document.querySelectorAll('button')].find(i => i.innerText === 'Show more').click()")
    says(browser, "Generation time that pat saves: +33.6 % over the default")
    browser.screenshot(screenshots / "mlflow-overview.png")
    assert problems(browser) == []


def test_the_report_opens_inside_of_mlflow(page, mlflow):
    browser = page(
        f"experiments/{mlflow.experiment}/runs/{mlflow.runs['report']['run_id']}/artifacts/report/index.html"
    )
    inside = "[...document.querySelectorAll('iframe')].map(each => each.srcdoc || each.src).join(' ')"
    browser.wait_for(f"{inside}.length > 0", seconds=60)
    assert problems(browser) == []
