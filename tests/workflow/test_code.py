"""The table CODE of the workflow names all code that a stage's results come from: nothing stale is reported."""

import ast

import pytest

from pat.basis import CODE
from tests.workflow.project import ROOT

PACKAGE = ROOT / "pat"
MODULES = {
    ".".join(("pat", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
TRAINING = ["pat.rl.train", "pat.rl.plugin", "pat.rl.server", "pat.rl.rollout", "pat.rl.reward"]
# What a stage runs, and the stages whose results it reads: when one of these runs again, it does too.
STAGES = {
    "hardware": (["pat.cluster"], []),
    "assets": (["pat.assets"], []),
    "profile": (["pat.profile", "pat.predictor.reference"], ["assets"]),
    "predictor": (["pat.predictor.fit"], ["assets", "profile"]),
    "train": (TRAINING, ["assets"]),
    "train-pat": (
        TRAINING,
        ["assets", "profile", "predictor"],
    ),
    "simulate": (["pat.simulate.run"], ["profile", "predictor"]),
    "report": (
        ["pat.report", "pat.jobs"],
        ["assets", "train", "train-pat", "predictor", "simulate"],
    ),
    "tracking": (["pat.tracking"], []),
}
# Imported, and yet no reason to run again: how things are told, checked or noted.
TELLS = {"pat.problems", "pat.logged", "pat.provenance", "pat.resume", "pat.cluster", "pat.usage", "pat.home"}
TELLS |= {"pat.basis", "pat.digest"}
# The settings that a stage reads are in its file of settings; only the arm pat predicts, and the profile has no policy.
PREDICTS = {"pat.predictive", *(name for name in MODULES if name.startswith("pat.predictor"))}
EXEMPT = {
    "assets": {"pat.layout"},  # which sizes divide a number of heads
    "profile": {"pat.config", "pat.policy"} | PREDICTS,
    "train": {"pat.model"} | PREDICTS,  # the model's shape is in the model's folder
    "train-pat": {"pat.model"},
    # Metrics that it takes from there are medians; the overview, all words, is of the report, which is logged again.
    "tracking": {name for name in MODULES if name.startswith(("pat.report", "pat.predictor"))},
}


def imported(name: str) -> set[str]:
    """Modules of the package that this one imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & MODULES.keys()) - {"pat"}


def reached(names: list[str]) -> set[str]:
    seen, ahead = set(), list(names)
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += imported(name)
    return seen


def listed(stage: str) -> set[str]:
    patterns = CODE.get(stage) or CODE[stage.partition("-")[0]]
    files = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    return {name for name, path in MODULES.items() if path in files}


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_of_what_a_stage_imports_runs_it_again(stage):
    entries, before = STAGES[stage]
    known = set().union(*(listed(each) for each in (stage, *before)))
    # An empty __init__.py is imported with every module of its package.
    needed = {name for name in reached(entries) if MODULES[name].name != "__init__.py" or imported(name)}
    assert needed - known - TELLS - EXEMPT.get(stage, set()) == set()


@pytest.mark.parametrize("stage", CODE)
def test_every_pattern_finds_a_file(stage):
    assert [pattern for pattern in CODE[stage] if not list(PACKAGE.glob(pattern))] == []


def test_an_exemption_is_of_something_imported():
    for stage, names in EXEMPT.items():
        if stage not in ("profile", "train", "tracking"):
            assert names <= reached(STAGES[stage][0])
