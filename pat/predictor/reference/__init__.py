"""The profile of a machine that one does not have: published SGLang measurements as the tables of `pat profile`.

aiconfigurator-core (NVIDIA, Apache-2.0) publishes measured GEMM, attention and all-reduce kernels of SGLang for
A100, H100, H200, L40S, B200 and others, and adds them up to the step of a model. It has no scheduler in it: a step
is the time of its kernels, bf16, at one tp on one node, all requests with the same context.
"""

from __future__ import annotations

import importlib
import json
import logging
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import polars as pl

from pat import provenance
from pat.model import ModelSpec, heads_for, hf_config
from pat.predictor.reference import switches, systems
from pat.problems import ConfigError, Problem, shown

# Every batch at which small kernels change tile, then each octave in four: between these the tables interpolate.
BATCHES = (*range(1, 9), *(2**octave * quarter // 4 for octave in range(3, 10) for quarter in range(5, 9)))
# Of one request: eighths of octaves from 16 to 8192 (SGLang's chunk on a GPU), since the fit gives a curve as many
# segments as there are token counts to tell them apart (latency.spread_knots).
PREFILL_TOKENS = tuple(round(2 ** (eighth / 8)) for eighth in range(32, 105))
PREFILL_REQUESTS = (1, 2, 4, 8, 16)
PREFILL_PREFIX = (0, 2048)
PREFILL_MOST = 16384  # new tokens of one step, SGLang's max_prefill_tokens
SWITCH_REQUESTS = (1, 4, 8, 16, 32, 64, 128)
SWITCH_CONTEXTS = (512, 2048, 8192)


class Reference:
    """Step times of one model on one machine, by tp; every answer in seconds."""

    def __init__(self, source: str, system: str, tp_sizes: tuple[int, ...]) -> None:
        """source: a model of `hf_config`, with its errors. Raises ConfigError for what has not been measured."""
        self.system = systems.system(system)
        logging.getLogger(systems.PACKAGE).setLevel(logging.ERROR)  # it tells of tables that a dense model has not
        sdk = importlib.import_module(f"{systems.PACKAGE}.sdk.engine")
        self.version = importlib.import_module(f"{systems.PACKAGE}.sdk.perf_database").get_version_slots(
            self.system.name, "sglang"
        )["current"]
        spec = ModelSpec.of(source)
        heads, kv_heads = heads_for(spec, tp_sizes)
        self.spec = replace(spec, heads=heads, kv_heads=kv_heads)
        self.base = min(tp_sizes)
        self.config = shape = hf_config(source) | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        bf16 = {f"{what}_quant_mode": "bfloat16" for what in ("gemm", "moe", "kvcache", "fmha")}
        # A folder of our own: any other name would be looked up on a hub. It is read while compiling.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape | {"head_dim": spec.head_dim}), encoding="utf-8")
            try:
                self.engines = {
                    tp: sdk.EngineHandle.compile(folder, self.system.name, "sglang", tp_size=tp, moe_tp_size=tp, **bf16)
                    for tp in tp_sizes
                }
                for tp in tp_sizes:
                    self.decode(tp, 1, 1024)
            except (ValueError, LookupError, RuntimeError) as error:  # all that it raises for what it has not
                reason = " ".join(str(error).replace(folder, source).split())
                allowed = f"a model that aiconfigurator-core has measurements for on {system} ({reason})"
                raise ConfigError(Problem(("model", "source"), shown(source), allowed)) from error

    def decode(self, tp: int, batch: int, context: int) -> float:
        """One decode step of ``batch`` requests with ``context`` tokens in KV each."""
        return self.engines[tp].decode_step_latency(batch, context, 2) / 1e3

    def prefill(self, tp: int, tokens: int, requests: int = 1, prefix: int = 0) -> float:
        """One prefill step of ``requests`` requests, each ``tokens`` new after ``prefix`` cached ones."""
        return self.engines[tp].predict_prefill_latency(requests, prefix + tokens, prefix) / 1e3

    def rows(self, tp_from: int, tp_to: int) -> float:
        """Putting the rows of fused weights in the order of another size: each is copied out and back."""
        return 4 * switches.rows_bytes(self.config, tp_from, tp_to, self.base) / self.system.memory_bytes_s


def contexts(longest: int) -> list[int]:
    """Half octaves from 64 to at least ``longest``: one a bucket of the fit (regression.bucket)."""
    known, half = [], 12
    while not known or known[-1] < longest:
        known.append(round(2 ** (half / 2)))
        half += 1
    return known


def decode_table(reference: Reference, longest: int) -> pl.DataFrame:
    """Rows (tp, batch, context, seconds, repeat) up to ``longest`` tokens a request; context is of the batch."""
    rows = [
        (tp, batch, batch * context, reference.decode(tp, batch, context), 0)
        for tp in reference.engines
        for batch in BATCHES
        for context in contexts(longest)
    ]
    schema = {"tp": pl.Int64, "batch": pl.Int64, "context": pl.Int64, "seconds": pl.Float64, "repeat": pl.Int32}
    return pl.DataFrame(rows, schema, orient="row")


def prefill_table(reference: Reference) -> pl.DataFrame:
    """Rows (tp, requests, tokens, prefix, seconds, repeat); tokens and prefix are of all requests together."""
    rows = [
        (tp, n, n * tokens, n * prefix, reference.prefill(tp, tokens, n, prefix), 0)
        for tp in reference.engines
        for n in PREFILL_REQUESTS
        for tokens in PREFILL_TOKENS
        for prefix in PREFILL_PREFIX
        if n * tokens <= PREFILL_MOST
    ]
    schema = dict.fromkeys(("tp", "requests", "tokens", "prefix"), pl.Int64)
    return pl.DataFrame(rows, schema | {"seconds": pl.Float64, "repeat": pl.Int64}, orient="row")


def run(cfg, experiment: Path) -> None:
    """Write ``profile/{decode,prefill,switch,transfer,generation}.parquet`` and ``machine.json``, as `pat.profile.run`.

    The last table has no rows: nothing was generated there. Raises ConfigError, see Reference.
    """
    started = time.monotonic()
    profile, sizes = cfg.profile, tuple(sorted(cfg.tp_sizes))
    reference = Reference(cfg.model.source, profile.system, sizes)
    ranks = min(cfg.ranks, reference.system.gpus)
    link = systems.link(reference.system, ranks, profile.link_gb_s)
    shapes = [(requests, context) for requests in SWITCH_REQUESTS for context in SWITCH_CONTEXTS]
    switch, transfer = switches.tables(
        reference.spec,
        ranks,
        sizes,
        shapes,
        link,
        reference.decode,
        reference.prefill,
        reference.rows,
        profile.switch_fixed_s,
    )
    decode = decode_table(reference, cfg.rollout.max_prompt + cfg.rollout.max_response)
    tables = {
        "decode": decode,
        "prefill": prefill_table(reference),
        "switch": switch,
        "transfer": transfer,
        "generation": decode.clear(),
    }
    out = experiment / "profile"
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.write_parquet(out / f"{name}.parquet")
        print(f"profile: {name}, {len(table)} rows", flush=True)
    about = {
        "seconds": time.monotonic() - started,
        "hostname": socket.gethostname(),
        "source": f"aiconfigurator-core, SGLang {reference.version} on {reference.system.name}; not this machine",
        "link": {"gb_s": link.bytes_s / 1e9, "source": link.source},
    }
    (out / "machine.json").write_text(json.dumps(about | provenance.facts(), indent=2) + "\n", encoding="utf-8")
    print(f"profile: {about['source']}; links {about['link']['gb_s']:.1f} GB/s ({link.source})", flush=True)
