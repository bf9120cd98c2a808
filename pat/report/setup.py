"""The set-up of an experiment as label and value, for the report's reader."""

from collections import Counter

from pat.report.experiment import Experiment
from pat.report.wording import count

GIB = 2**30
TIMES = "\N{MULTIPLICATION SIGN}"
DECISION = {"margin": "margin {}", "kv": "KV cache: {}", "max_switches": "at most {} switches an iteration"}


def rows(experiment: Experiment) -> list[tuple[str, str]]:
    """What ran on what. A section that the configuration lacks leaves its row out."""
    config, hardware = experiment.config, experiment.hardware or {}
    model, data, rollout, train = (config.get(name) or {} for name in ("model", "data", "rollout", "train"))
    runs = [arm.run for arm in experiment.arms.values()]
    origin = runs[0] if runs else experiment.profiled or {}
    versions = origin.get("versions") or hardware.get("versions") or {}
    commits = [record.get("git") for record in runs or [origin]]
    found = [
        ("Machine", "; ".join(_machines(hardware)) if hardware else _elsewhere(experiment)),
        ("Ranks and sizes", _join(config, ranks=_ranks(train), tp_sizes="tensor-parallel sizes {}")),
        ("Model", _join(model, source="{}", dtype="{}")),
        ("Data", _join(data, source="{}", train_size="{} prompts")),
        ("Batch", _batch(rollout)),
        ("Response limit", _join(rollout, max_response="{} tokens", temperature="temperature {}")),
        ("Lengths", _lengths(rollout) if runs else ""),
        ("Training", _join(train, iterations="{} iterations", lr="learning rate {}", mixed_precision="{}")),
        ("Decision", _join(config.get("policy") or {}, **DECISION)),
        ("Simulated", _simulated(experiment)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Code", ", ".join(sorted({str(commit)[:12] for commit in commits if commit}))),
    ]
    return [(label, value) for label, value in found if value]


def _ranks(train: dict) -> str:
    nodes = train.get("nodes", 1)
    return "{} ranks" if nodes == 1 else f"{nodes} nodes of {{}} ranks, a group on each"


def _elsewhere(experiment: Experiment) -> str:
    """A machine that was not run on."""
    system = (experiment.config.get("profile") or {}).get("system")
    source = (experiment.profiled or {}).get("source")
    return ", ".join(part for part in (system and f"{experiment.config['ranks']} {TIMES} {system}", source) if part)


def _simulated(experiment: Experiment) -> str:
    if experiment.simulated is None:
        return ""
    stage, lengths = experiment.simulated.summary["stage"], (experiment.config.get("simulate") or {}).get("lengths")
    nodes, responses = stage["nodes"], stage["responses"]
    words = [f"{count(responses)} responses on {nodes} {'node' if nodes == 1 else 'nodes'} of {stage['ranks']} ranks"]
    words.append(f"prompts of {count(stage['prompt'])} tokens, responses of at most {count(stage['max_response'])}")
    if lengths and lengths.get("kind") == "lognormal":
        words.append(f"lengths lognormal({lengths['mu']:g}, {lengths['sigma']:g})")
    elif lengths and lengths.get("kind"):
        words.append(f"lengths {lengths['kind']}")
    words.append(f"{count(stage['repeats'])} repeats")
    return ", ".join(words)


def model_name(experiment: Experiment) -> str:
    """The model's source, without the folders of a local checkpoint."""
    return str((experiment.config.get("model") or {}).get("source", "this model")).rstrip("/").split("/")[-1]


def machine_name(experiment: Experiment) -> str:
    """The machine in a few words: the one that trained, or the one that was simulated."""
    if experiment.hardware is not None:
        return "this machine"
    config = experiment.config
    system, ranks = (config.get("profile") or {}).get("system"), config.get("ranks")
    nodes = experiment.simulated.summary["stage"]["nodes"]
    one = f"{ranks} {TIMES} {system}" if system else f"{ranks} ranks"
    return f"{nodes} nodes of {one}" if nodes > 1 else one


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
