"""What README.md, config/README.md and docs/ tell people to type works, and what they name is there.

Every command is found by its place (an indented block, or code in a sentence) and its first word. One that nobody
tests fails ``test_every_command_is_tested``.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from pat import cli, configfile, workload
from pat.problems import ConfigError
from pat.simulate import Requests, simulate
from tests.simulate.machines import machine
from tests.workflow.project import ROOT, copy_project

FILES = [ROOT / "README.md", ROOT / "config" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {file.relative_to(ROOT).as_posix(): file.read_text() for file in FILES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
VARIABLES = re.compile(r"^(?:[A-Z][A-Z_]*=\S+ )*")


class Command(NamedTuple):
    doc: str
    text: str
    inline: bool  # code in a sentence, not a line of a block

    @property
    def words(self) -> list[str]:
        """Without variables; .venv/bin/pat is pat, a configuration of the reader's own one that there is."""
        text = VARIABLES.sub("", self.text).replace("config/my-experiment.yaml", "config/ci.yaml")
        return shlex.split(text.removeprefix(".venv/bin/"))

    @property
    def variables(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in VARIABLES.match(self.text)[0].split())


def blocks(text: str) -> list[str]:
    """Lines of the indented blocks, continued ones joined."""
    lines = re.findall(r"^ {4,}(\S.*)$", FENCE.sub("", text).replace("\\\n", " "), re.M)
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines]


# What is typed in a terminal. Other code in a sentence (a file, a key, an option) is none of it, nor is the name of a
# program alone.
TOOLS = ("make", "pat", "snakemake", "pytest", "pip", "uv", "python", "sbatch", "squeue", "scancel", "scontrol", "cp")
TOOLS += ("apptainer",)


def commands() -> list[Command]:
    found = []
    for doc, text in TEXTS.items():
        for line in blocks(text):
            found += [Command(doc, part.strip(), False) for part in line.split(" && ")]
        for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
            found.append(Command(doc, code, True))
    return [c for c in found if not c.inline or (len(c.text.split()) > 1 and first(c) in TOOLS)]


def first(command: Command) -> str:
    return VARIABLES.sub("", command.text).removeprefix(".venv/bin/").split()[0]


def is_yaml(line: str) -> bool:
    return re.match(r"[\w.-]+:( |$)", line) is not None


def is_formula(line: str) -> bool:
    return re.match(r"\w+(\([^)]*\))? = ", line) is not None


def is_path(line: str) -> bool:
    return "/" in line.split()[0] and (ROOT / line.split()[0].rstrip(",")).exists()


OTHER = (is_yaml, is_path, is_formula)
COMMANDS = [c for c in dict.fromkeys(commands()) if c.inline or not any(kind(c.text) for kind in OTHER)]
# Tested where the real thing is at hand: (document, start of the command, file and test).
ELSEWHERE = [
    ("docs/clusters.md", "snakemake", "tests/test_clusterfile.py", "test_commands_of_the_docs_work"),
    ("docs/results.md", "snakemake", "tests/test_results_doc.py", "test_commands_plan"),
    ("docs/training.md", "sbatch", "tests/slurm/test_training_nodes.py", "test_two_nodes_train_together"),
    ("docs/clusters.md", "squeue --me --format", "tests/slurm/test_faults.py", "test_after_a_kill_the_job_is_found"),
    ("docs/clusters.md", "scancel", "tests/slurm/test_faults.py", "test_after_a_kill_the_job_is_found"),
    ("docs/clusters.md", "scontrol show job", "tests/slurm/test_faults.py", "test_a_lost_node_costs_only_the_time"),
    ("docs/clusters.md", "uv pip install --no-deps -r", "tests/test_requirements.py", "test_the_set_for_gpus"),
    ("README.md", "snakemake --profile local --touch", "tests/workflow/test_dryrun.py", "test_copied_results"),
    ("README.md", "snakemake --profile local --unlock", "tests/workflow/test_kill.py", "test_a_killed_snakemake"),
    ("README.md", "cp -a", "tests/workflow/test_dryrun.py", "test_what_the_table_says_runs_again"),
]  # fmt: skip


def elsewhere(command: Command) -> bool:
    return any(
        command.doc == doc and command.text.startswith(start) and (not command.inline or start != "snakemake")
        for doc, start, *_ in ELSEWHERE
    )


def of(*tools: str) -> list[Command]:
    """Commands of these programs that are tested here."""
    return [c for c in COMMANDS if first(c) in tools and not elsewhere(c)]


MAKE, PAT, SNAKEMAKE, PYTEST = of("make"), of("pat"), of("snakemake"), of("pytest")
PIP, VENV, VERL = of("pip", "uv"), of("python3.11", "."), of("python")
APPTAINER = of("apptainer")
HERE = [*MAKE, *PAT, *SNAKEMAKE, *PYTEST, *PIP, *VENV, *VERL, *APPTAINER]


def named(commands: list[Command]) -> dict:
    return {"argvalues": commands, "ids": [command.text for command in commands]}


def run(*words: str, cwd: Path = ROOT, **variables: str) -> str:
    env = os.environ | variables
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_every_command_is_tested():
    assert [command for command in COMMANDS if command not in HERE and not elsewhere(command)] == []
    assert len(COMMANDS) > 40
    for doc, start, file, name in ELSEWHERE:
        assert [c for c in COMMANDS if c.doc == doc and c.text.startswith(start)], f"{doc} has no {start}"
        assert f"def {name}" in (ROOT / file).read_text(), f"{file}::{name}"


@pytest.mark.parametrize("command", **named(MAKE))
def test_make(command):
    out = run("make", "-n", *command.words[1:], **command.variables)
    assert out
    assert all(value in out for value in command.variables.values())


@pytest.mark.parametrize("command", **named(PAT))
def test_pat(command):
    words = command.words[1 : command.words.index(">") if ">" in command.words else None]
    words = [word.replace("a,mine", "a,c") for word in words]
    assert [w for w in words if w.startswith("config/") and not (ROOT / w).exists()] == []
    done = CliRunner().invoke(cli.app, [*words, "--help"])  # an option that is not there is an error all the same
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output


def test_pat_check_really_runs(monkeypatch):
    (command,) = [c for c in PAT if c.words[1] == "check"]
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli.app, command.words[1:])
    assert "ci-llama: arms threshold6; tiny-llama, arithmetic" in done.output


def subcommands(group=None, path=()):
    import typer

    group = group or typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        yield from subcommands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]


@pytest.mark.parametrize("path", list(subcommands()), ids=" ".join)
def test_every_help_has_an_example_that_is_right(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    done = CliRunner().invoke(cli.app, [*path, "--help"])
    (example,) = re.findall(r"^ *Example: (pat .*?) *$", done.output, re.M)
    words = example.partition(" >")[0].split()[1:]
    assert tuple(words[: len(path)]) == path
    assert all(option in done.output for option in words if option.startswith("--") and path != ("logged",))
    assert CliRunner().invoke(cli.app, [*words, "--help"]).exit_code == 0
    for file in re.findall(r"config/\S+\.yaml", example):
        assert (ROOT / file).exists()
    if "--experiment" in words:
        assert words[words.index("--experiment") + 1] in configfile.load(ROOT / "config" / "ci.yaml")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """For dry runs, which leave no results."""
    return copy_project(tmp_path_factory.mktemp("project"))


@pytest.mark.workflow
@pytest.mark.parametrize("words", list(dict.fromkeys(tuple(c.words) for c in SNAKEMAKE)), ids=" ".join)
def test_snakemake_plans(words, project):
    if "config/h100-llama3.1-8b.yaml" in words:
        pytest.importorskip("aiconfigurator_core")
    out = run(sys.executable, "-m", *words, *([] if "-n" in words else ["-n"]), cwd=project)
    assert re.search(r"^all +1$", out, re.M)
    assert "Report (" in out


@pytest.mark.parametrize("command", **named(PYTEST))
def test_pytest_finds_tests(command):
    out = run(sys.executable, "-m", *command.words, "--collect-only", "-q", "-p", "no:cacheprovider")
    assert re.search(r"^tests/.*::test_", out, re.M)


@pytest.mark.parametrize("command", **named(PIP))
def test_what_is_installed_is_what_is_pinned(command):
    """Installing it is the work of ``make env``; here: the versions and files that are named are ours."""
    words = command.words[command.words.index("install") + 1 :]
    pins = "".join((ROOT / file).read_text() for file in ("pyproject.toml", "envs/cpu.txt", "envs/cuda.txt"))
    operands = [word for word in words if not word.startswith("-")]
    assert operands
    for word in operands:
        if "==" not in word:
            assert (ROOT / word / "pyproject.toml").exists() or (ROOT / word).is_file()
        elif word.endswith(".*"):
            assert f'["{word.partition("==")[0]}"]' in pins  # an extra whose release the cluster decides
        else:
            assert word in pins


@pytest.mark.parametrize("command", **named(VENV))
def test_environment_can_be_made(command, tmp_path):
    words = command.words
    if words[0] == ".":
        assert words == [".", ".venv/bin/activate"]  # what venv makes
    else:
        run(sys.executable, *words[1:-1], "--without-pip", str(tmp_path / "venv"))
        assert (tmp_path / "venv" / "bin" / "activate").exists()


@pytest.mark.parametrize("command", **named(VERL))
def test_verl_knows_the_settings(command):
    """Hydra puts them together with verl's own, without starting anything."""
    pytest.importorskip("hydra")
    from hydra import compose, initialize_config_dir

    from pat.rl.settings import Settings

    _, dash, module, *overrides = command.words
    assert (dash, module) == ("-m", "verl.trainer.main_ppo")
    import importlib.util

    verl = Path(importlib.util.find_spec("verl").origin).parent
    with initialize_config_dir(str(verl / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", [o.replace("EXPERIMENT", "name") for o in overrides if o != "..."])
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == "pat"
    settings = Settings.from_verl(rollout.custom, rollout.tensor_model_parallel_size)
    assert settings.tp_sizes == (1, 2, 4, 8)
    assert settings.predictor.name == "model.json"


@pytest.mark.parametrize("command", **named(APPTAINER))
def test_container_has_its_definition(command):
    assert (ROOT / command.words[-1]).is_file()


LINKS = [(doc, link) for doc, text in TEXTS.items() for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("doc", "link"), [each for each in LINKS if not each[1].startswith("http")], ids=str)
def test_every_link_leads_somewhere(doc, link):
    path, _, anchor = link.partition("#")
    target = ((ROOT / doc).parent / path).resolve() if path else ROOT / doc
    assert target.exists()
    if anchor:
        assert anchor in anchors(target.read_text())


def test_every_file_and_name_of_the_code_is_there():
    for doc, text in TEXTS.items():
        for path in re.findall(r"`((?:pat|tests|config|workflow|envs|docs)/[\w./-]+)`", text):
            assert (ROOT / path.replace("my-experiment", "ci")).exists(), f"{doc}: {path}"
        for one, other, path in re.findall(r"`(\w+)`(?: and `(\w+)`)? (?:in|of)\s+`((?:pat|tests)/[\w./-]+)`", text):
            for name in filter(None, (one, other)):
                assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{doc}: {name} in {path}"


def fences(doc: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(TEXTS[doc]) if kind == language]


def test_fenced_code_is_of_a_kind_that_is_tested():
    # Python of the README: tests/engine/test_readme_example.py; YAML of clusters.md: tests/test_clusterfile.py.
    kinds = {(doc, kind) for doc, text in TEXTS.items() for kind, _ in FENCE.findall(text)}
    here = {("docs/extending.md", "python"), ("docs/extending.md", "yaml"), ("docs/training.md", "yaml")}
    assert kinds == here | {("README.md", "python"), ("docs/clusters.md", "yaml")}


def snippets() -> list[str]:
    """Pieces of configuration: fenced, as a block, or in a sentence as `train.extra: {...}`."""
    found = [code for doc in ("docs/training.md",) for code in fences(doc, "yaml")]
    for text in TEXTS.values():
        plain = FENCE.sub("", text)
        for block in re.findall(r"(?:^ {4,}\S.*\n)+", plain, re.M):
            if all(is_yaml(line.strip()) for line in block.splitlines()):
                found.append("\n".join(line[4:] for line in block.splitlines()))
        found += re.findall(r"`(\w+: \{[^`]*\})`", plain)
    return found


@pytest.mark.parametrize("text", snippets())
def test_configuration_snippets_have_no_unknown_key(text):
    raw = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    try:
        configfile.parse(configfile.merge(raw, yaml.safe_load(text)))
    except ConfigError as error:  # values may want others that the snippet does not show
        assert "unknown key" not in str(error)


def test_the_example_for_gpus_is_a_whole_configuration(tmp_path, monkeypatch):
    (text,) = [code for code in fences("docs/training.md", "yaml") if "model:" in code]
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "?"}], "ability": "a"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": 0}}
    pl.DataFrame([row]).write_parquet(tmp_path / "prompts.parquet")
    raw = yaml.safe_load(text)
    raw["model"]["source"], raw["data"]["source"] = str(tmp_path), str(tmp_path / "prompts.parquet")
    (config,) = configfile.parse(raw).values()
    assert [warning for warning in configfile.warnings(config) if not warning.startswith("ranks: ")] == []


def test_the_policy_of_extending_switches_when_it_says():
    (code,) = fences("docs/extending.md", "python")
    names: dict = {}
    exec(code, names)
    on = machine(ranks=2)
    result = simulate(on, lambda: names["OnceLong"](2, 100), Requests.of([40, 200, 300, 400], 50))
    (switch,) = result.switches
    assert (switch.tp_from, switch.tp_to, switch.kv) == (1, 2, "migrate")
    assert switch.unfinished == 3  # the shortest has ended before it got so far
    assert simulate(on, lambda: names["OnceLong"](2, 500), Requests.of([40, 200], 50)).switches == []


def test_the_workload_of_extending_can_be_drawn(tmp_path):
    (tmp_path / "workloads.yaml").write_text("".join(itertools.chain(fences("docs/extending.md", "yaml"))))
    (mine,) = workload.load(tmp_path / "workloads.yaml").values()
    lengths = mine.draw(0)
    assert len(lengths) == 32
    assert max(lengths) == 1024
