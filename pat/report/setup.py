"""The set-up of an experiment as label and value, for the report's reader."""

from collections import Counter

from pat.report.experiment import Experiment
from pat.report.wording import count

GIB = 2**30
TIMES = "\N{MULTIPLICATION SIGN}"
DECISION = {"margin": "margin {}", "kv": "KV cache: {}", "max_switches": "at most {} switches an iteration"}


def rows(experiment: Experiment) -> list[tuple[str, str]]:
    """What ran on what. A section that the configuration lacks leaves its row out."""
    config, hardware = experiment.config, experiment.hardware
    model, data, rollout, train = (config.get(name) or {} for name in ("model", "data", "rollout", "train"))
    runs = [arm.run for arm in experiment.arms.values()]
    versions = runs[0].get("versions") or hardware.get("versions") or {}
    found = [
        ("Machine", "; ".join(_machines(hardware))),
        ("Ranks and sizes", _join(config, ranks="{} ranks", tp_sizes="tensor-parallel sizes {}")),
        ("Model", _join(model, source="{}", dtype="{}")),
        ("Data", _join(data, source="{}", train_size="{} prompts")),
        ("Batch", _batch(rollout)),
        ("Response limit", _join(rollout, max_response="{} tokens", temperature="temperature {}")),
        ("Lengths", _lengths(rollout)),
        ("Training", _join(train, iterations="{} iterations", lr="learning rate {}", mixed_precision="{}")),
        ("Decision", _join(config.get("policy") or {}, **DECISION)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Code", ", ".join(sorted({str(run["git"])[:12] for run in runs if run.get("git")}))),
    ]
    return [(label, value) for label, value in found if value]


def model_name(experiment: Experiment) -> str:
    """The model's source, without the folders of a local checkpoint."""
    return str((experiment.config.get("model") or {}).get("source", "this model")).rstrip("/").split("/")[-1]


def _join(section: dict, **templates: str) -> str:
    values = {key: section.get(key) for key in templates}
    return ", ".join(
        templates[key].format(", ".join(map(str, value)) if isinstance(value, list) else value)
        for key, value in values.items()
        if value is not None
    )


def _machines(hardware: dict) -> list[str]:
    kinds = Counter(_node(node, hardware.get("cpu_model")) for node in hardware["nodes"])
    return [f"{times} nodes, each {kind}" if times > 1 else kind for kind, times in kinds.items()]


def _node(node: dict, cpu_model: str | None) -> str:
    devices = Counter(device["name"] for device in node.get("devices") or [])
    parts = [f"{times} {TIMES} {name}" for name, times in devices.items()]
    parts.append(f"{node['cpus']} CPU cores" + (f" ({cpu_model})" if cpu_model else ""))
    if node.get("memory_bytes"):
        parts.append(f"{count(round(node['memory_bytes'] / GIB))} GiB memory")
    if node.get("links"):
        parts.append(node["links"])
    if not devices:
        parts.append("no accelerator")
    return ", ".join(parts)


def _batch(rollout: dict) -> str:
    prompts, samples = rollout.get("prompts"), rollout.get("samples")
    if not (prompts and samples):
        return ""
    return f"{prompts} prompts {TIMES} {samples} samples = {prompts * samples} responses"


def _lengths(rollout: dict) -> str:
    if not rollout:
        return ""
    return "replayed, as configured" if rollout.get("lengths") else "natural: the model ends its responses"
