"""From a YAML file to its experiments, with every check that can be made before anything heavy starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pat import arms
from pat.config import SWITCHED_TOKENS, Config, File
from pat.model import BUILTIN, PUBLISHED, ModelSpec, UnsupportedModel, heads_for
from pat.problems import ConfigError, Problem, shown, translate
from pat.yamlfile import read

EXTRAPOLATED = 4  # times the longest profiled context that step times may be extrapolated to without a warning
GREEDY = 1e-6  # below this temperature SGLang takes the likeliest token
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``override``; mappings are merged, anything else is replaced."""
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def parse(raw: Any) -> dict[str, Config]:
    """The experiments, by name, of a file's contents. Raises ConfigError that lists all problems."""
    if not isinstance(raw, Mapping):
        allowed = f"a mapping with the keys {', '.join(File.model_fields)}"
        raise ConfigError(Problem(("the whole file",), shown(raw), allowed))
    experiments = raw.get("experiments")
    if not isinstance(experiments, Mapping) or not experiments:
        allowed = "a mapping NAME: {what it changes}, at least one"
        raise ConfigError(Problem(("experiments",), shown(experiments), allowed))
    base = {key: value for key, value in raw.items() if key != "experiments"}
    configs, problems = {}, []
    for name, override in experiments.items():
        place = ("experiments", str(name))
        if not _NAME.fullmatch(str(name)):
            problems.append(
                Problem(place, shown(name), "a name of letters, digits, '.', '_' and '-' (it names a folder)")
            )
        if not isinstance(override, Mapping):
            problems.append(Problem(place, shown(override), "a mapping of what it changes, {} for nothing"))
            continue
        try:
            configs[str(name)] = config = Config.model_validate(merge(base, override))
            found = list(_checks(config))
        except ValidationError as error:
            found = translate(Config, error)
        problems += [problem.within(str(name), override) for problem in found]
    if problems:
        raise ConfigError(*problems)
    return configs


def load(path: str | Path) -> dict[str, Config]:
    """``parse`` of the file at ``path``."""
    return parse(read(path))


def _checks(config: Config) -> Iterator[Problem]:
    """What the schema cannot say: values that do not go together, files that are not there."""
    yield from _tp_and_arms(config)
    yield from _rollout(config)
    yield from _simulate(config)
    yield from _model(config)
    yield from _reference(config)
    yield from _data(config)
    yield from _tracking(config)
    yield from _options(config)


def _tp_and_arms(config: Config) -> Iterator[Problem]:
    divisors = [n for n in range(1, config.ranks + 1) if config.ranks % n == 0]
    allowed = f"different divisors of ranks ({', '.join(map(str, divisors))}), each of which divides the larger ones"
    sizes = sorted(config.tp_sizes)
    if (
        not set(sizes) <= set(divisors)
        or len(set(sizes)) < len(sizes)
        or any(wide % narrow for narrow, wide in pairwise(sizes))
    ):
        yield Problem(("tp_sizes",), shown(list(config.tp_sizes)), allowed)
        return  # the arms' names follow from the sizes
    if len(set(config.arms)) < len(config.arms) or not all(arms.known(arm, sizes) for arm in config.arms):
        yield Problem(("arms",), shown(list(config.arms)), f"each of {arms.allowed(sizes)} once at most")
    if config.arms and config.model.source in PUBLISHED:
        allowed = f"[], or model.source: the folder of a checkpoint; of {config.model.source} only the shape is known"
        yield Problem(("arms",), shown(list(config.arms)), allowed)


def _rollout(config: Config) -> Iterator[Problem]:
    rollout, train = config.rollout, config.train
    if rollout.lengths and max(rollout.lengths) > rollout.max_response:
        longest = max(rollout.lengths)
        yield Problem(("rollout", "lengths"), str(longest), f"at most rollout.max_response = {rollout.max_response}")
    longest = rollout.max_prompt + rollout.max_response
    if rollout.kv_tokens < longest:
        sum_ = f"rollout.max_prompt + rollout.max_response = {longest}"
        yield Problem(("rollout", "kv_tokens"), str(rollout.kv_tokens), f"at least {sum_}, one request")
    profile = config.profile
    batch, context = max(profile.batches), max(profile.contexts)
    merged = batch * max(config.tp_sizes)  # requests of the widest replica, which share a prompt
    switched = (batch, min(profile.contexts)), (min(4, batch), context)  # see pat.profile.points
    profiled = max(
        context + merged * profile.steps, *(requests * (tokens + SWITCHED_TOKENS) for requests, tokens in switched)
    )
    if profile.source == "engine" and longest <= rollout.kv_tokens < profiled:
        allowed = f"at least {profiled}, which the profile's batches and contexts fill at once"
        yield Problem(("rollout", "kv_tokens"), str(rollout.kv_tokens), allowed)
    if config.arms and rollout.temperature < GREEDY:
        allowed = f"at least {GREEDY:g}: greedy answers to a prompt are equal, have no advantage over each other, and "
        yield Problem(("rollout", "temperature"), f"{rollout.temperature:g}", allowed + "training would learn nothing")
    responses, ranks = rollout.prompts * rollout.samples, config.ranks * train.nodes
    told = f"{config.ranks}" if train.nodes == 1 else f"{config.ranks} x train.nodes = {train.nodes}"
    if responses % ranks:
        allowed = f"such that rollout.prompts x rollout.samples is a multiple of ranks = {told}"
        yield Problem(("rollout", "prompts"), str(rollout.prompts), allowed)
    elif responses // ranks % train.micro_batch:
        product = f"rollout.prompts x rollout.samples / ranks = {responses} / {ranks}"
        yield Problem(("train", "micro_batch"), str(train.micro_batch), f"a divisor of {product}")
    if config.data.train_size < rollout.prompts:
        yield Problem(
            ("data", "train_size"),
            str(config.data.train_size),
            f"at least rollout.prompts = {rollout.prompts}",
        )


def _simulate(config: Config) -> Iterator[Problem]:
    rollout, simulate, lengths = config.rollout, config.simulate, config.simulate.lengths
    nodes = simulate.nodes or config.train.nodes
    if simulate.responses is not None and simulate.responses < nodes:
        allowed = f"at least simulate.nodes = {nodes}, one a node"
        yield Problem(("simulate", "responses"), str(simulate.responses), allowed)
    elif rollout.prompts * rollout.samples < nodes and simulate.responses is None:
        allowed = "at least simulate.nodes, or fewer nodes"
        yield Problem(
            ("simulate", "responses"), f"rollout.prompts x samples = {rollout.prompts * rollout.samples}", allowed
        )
    longest = (simulate.prompt or rollout.max_prompt // 2) + rollout.max_response
    if (simulate.kv_tokens or max(rollout.kv_tokens, rollout.max_prompt + rollout.max_response)) < longest:
        key, value = ("kv_tokens", simulate.kv_tokens) if simulate.kv_tokens else ("prompt", simulate.prompt)
        allowed = f"a KV cache that holds simulate.prompt + rollout.max_response = {longest}, one request"
        yield Problem(("simulate", key), str(value), allowed)
    place = ("simulate", "lengths")
    if lengths.kind == "listed" and not lengths.tokens and not rollout.lengths:
        yield Problem((*place, "tokens"), "nothing", "a list of tokens, or rollout.lengths")
    if lengths.high is not None and lengths.high < lengths.low:
        yield Problem((*place, "high"), str(lengths.high), f"at least simulate.lengths.low = {lengths.low}")
    if lengths.kind == "file" and (lengths.path is None or not Path(lengths.path).is_file()):
        yield Problem((*place, "path"), shown(lengths.path), "a file that exists")


def _model(config: Config) -> Iterator[Problem]:
    source, place = config.model.source, ("model", "source")
    try:
        spec = ModelSpec.of(source)
        heads_for(spec, config.tp_sizes)
    except OSError:
        allowed = f"{', '.join(BUILTIN)}, or the folder of a Hugging Face checkpoint (with a config.json)"
        if config.profile.source == "aiconfigurator":
            allowed = f"{', '.join(PUBLISHED)}, {allowed}"
        yield Problem(place, shown(source), allowed)
    except UnsupportedModel as error:
        yield Problem(place, shown(source), f"a model that tp {', '.join(map(str, config.tp_sizes))} divides; {error}")
    else:
        rollout, profile = config.rollout, config.profile
        reached = {("rollout", "max_response"): rollout.max_prompt + rollout.max_response}
        if profile.source == "engine":
            reached["profile", "contexts"] = max(profile.contexts) + profile.steps
            reached["profile", "prefill"] = max(profile.prefill)
            if source in PUBLISHED:
                allowed = (
                    "the folder of its checkpoint; known by name is only its shape (profile.source: aiconfigurator)"
                )
                yield Problem(place, shown(source), allowed)
        for key, tokens in reached.items():
            if tokens > spec.max_positions:
                yield Problem(key, f"{tokens} tokens in all", f"at most {spec.max_positions}, which {source} handles")


def _reference(config: Config) -> Iterator[Problem]:
    """The profile of another machine."""
    profile = config.profile
    if profile.source == "engine":
        for key in ("system", "link_gb_s", "switch_fixed_s"):
            if getattr(profile, key) is not None:
                allowed = "nothing, unless profile.source is aiconfigurator"
                yield Problem(("profile", key), shown(getattr(profile, key)), allowed)
        return
    from pat.predictor.reference import systems

    try:
        gpus = systems.system(profile.system).gpus
    except ConfigError as error:
        yield from error.problems
        return
    if max(config.tp_sizes) > gpus:
        yield Problem(("tp_sizes",), str(max(config.tp_sizes)), f"at most {gpus}, the GPUs of a {profile.system} node")
    if config.model.dtype != "bfloat16":
        yield Problem(("model", "dtype"), shown(config.model.dtype), "bfloat16, in which the machine was measured")
    try:
        quantised = ModelSpec.of(config.model.source).quantised
    except (OSError, UnsupportedModel):
        return  # already told
    if quantised:
        allowed = "a model that is not quantised: the measurements are of bfloat16"
        yield Problem(("model", "source"), shown(config.model.source), allowed)


def _data(config: Config) -> Iterator[Problem]:
    from pat.assets import schema

    if config.data.source not in schema.GENERATED:
        try:
            schema.check(config.data.source, config.own_reward)
        except ValueError as error:
            yield Problem(("data", "source"), shown(config.data.source), str(error))


def _tracking(config: Config) -> Iterator[Problem]:
    uris = {("tracking", "uri"): config.tracking.uri, ("MLFLOW_TRACKING_URI",): os.environ.get("MLFLOW_TRACKING_URI")}
    for place, uri in uris.items():
        file = uri and uri.removeprefix("sqlite:///")
        if uri and ("://" not in uri or uri.startswith("file:") or (file != uri and Path(file).is_dir())):
            allowed = "sqlite:///FILE or a server's URL; MLflow no longer writes to a folder"
            yield Problem(place, shown(uri), allowed)


def _options(config: Config) -> Iterator[Problem]:
    """What SGLang, verl and the engine would refuse hours later."""
    from pat.engine import options as engine
    from pat.rl import options as training

    for name, allowed in engine.problems(config.rollout.sglang):
        yield Problem(("rollout", "sglang", name), shown(config.rollout.sglang[name]), allowed)
    for key, got, allowed in training.problems(config):
        yield Problem(("train", "extra", *filter(None, [key])), got, allowed)


def warnings(config: Config) -> Iterator[str]:
    """What will run, but not well, on this machine."""
    if config.profile.source != "engine":
        return  # it is about another one
    cores = len(os.sched_getaffinity(0))
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus and config.ranks > gpus:
        yield f"ranks: {config.ranks} ranks on {gpus} GPUs; each rank needs its own"
    elif not gpus and config.ranks > cores:
        yield f"ranks: {config.ranks} ranks on {cores} cores; they wait for each other, timings mean little"
    longest, profiled = config.rollout.max_prompt + config.rollout.max_response, max(config.profile.contexts)
    if "pat" in config.arms and longest > EXTRAPOLATED * profiled:
        yield (
            f"profile.contexts: at most {profiled} of up to {longest} tokens a request are profiled; steps beyond are "
            "extrapolated. Profile contexts up to the longest, and batches up to what a replica gets"
        )
