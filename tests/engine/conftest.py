"""Real SGLang engines on tiny random models, and Hugging Face as the reference."""

import asyncio
from dataclasses import dataclass, field

import psutil
import pytest

from pat.engine.cpu import environment, processes

environment.prepare()

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


KINDS = {
    "qwen3": ("qwen3", {"head_dim": 16}),  # qk-norm, untied
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),  # bias in attention
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
}


def write_model(folder, kind: str, seed: int = 0, dtype: str = "float32", **shape):
    """A random checkpoint of a kind of KINDS; shape: fields of its configuration that differ from SHAPE."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, extra = KINDS[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SHAPE | extra | shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a new model's are zero, and would hide a wrong one
                parameter.normal_(std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@dataclass
class Reference:
    """Hugging Face on the same checkpoint, without a KV cache of ours."""

    folder: str
    dtype: str = "float32"

    def __post_init__(self):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self.dtype)).eval()

    def greedy(self, prompt, tokens):
        with self.torch.no_grad():
            out = self.model.generate(
                self.torch.tensor([prompt]),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
            )
        return out[0, len(prompt) :].tolist()

    def logprobs(self, prompt, response):
        """Teacher-forced log-probability of each response token."""
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([prompt + response])).logits[0].float().log_softmax(-1)
        return [logits[len(prompt) - 1 + k, token].item() for k, token in enumerate(response)]


@dataclass
class Job:
    """One request of a test."""

    prompt: list
    tokens: int
    seed: int
    params: dict = field(default_factory=dict)  # more sampling parameters
    options: dict = field(default_factory=dict)  # more arguments of generate


def jobs(lengths, shared_prompt=False):
    """Requests with the given response lengths; half of them share a prompt if asked."""
    made = []
    for i, length in enumerate(lengths):
        which = i % 2 if shared_prompt else i
        made.append(Job([(7 * which + 3 * j) % 500 + 3 for j in range(9 + 2 * which)], length, 1000 + i))
    return made


class Driver:
    """Runs requests on an engine and switches when they have come so far."""

    def __init__(self, engine):
        self.engine = engine

    def run(self, requests, temperature=0.0, switches=(), during=None):
        """Outputs of ``requests``. switches: (generated tokens of the slowest, tp, kv); during: a coroutine."""
        return self.engine.loop.run_until_complete(self._run(requests, temperature, switches, during))

    async def request(self, job, temperature, rid=None):
        params = {"temperature": temperature, "max_new_tokens": job.tokens, "ignore_eos": True}
        return await self.engine.async_generate(
            rid=rid,
            input_ids=job.prompt,
            sampling_params=params | {"sampling_seed": job.seed} | job.params,
            return_logprob=True,
            **job.options,
        )

    async def progress(self, tokens, live):
        """Until at most ``live`` requests are left and each of them has ``tokens`` tokens."""
        for _ in range(30_000):
            self.engine.watch.check()
            rows = [row for replica in self.engine.live_rows() for row in replica]
            if rows and len(rows) <= live and min(row[2] for row in rows) >= tokens:
                return
            await asyncio.sleep(0.002)
        raise TimeoutError(f"no {live} requests with {tokens} tokens; live: {rows}")

    async def _run(self, requests, temperature, switches, during):
        work = [asyncio.ensure_future(self.request(job, temperature)) for job in requests]
        for tokens, tp, kv in switches:
            await self.progress(tokens, len(requests))
            await self.engine.async_switch(tp, kv)
        if during:
            await during()
        outputs = await asyncio.wait_for(asyncio.gather(*work), 120)
        await self.engine.end_iteration()
        return outputs


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """write_model(kind, seed) once a session."""
    made = {}

    def get(kind, seed=0, **shape):
        key = (kind, seed, *sorted(shape.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(str(part) for part in key if not isinstance(part, tuple)))
            made[key] = str(write_model(folder, kind, seed, **shape))
        return made[key]

    return get


def start(folder, **options):
    processes.warm()
    from pat.engine.api import Engine

    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "log_level": "error"}
    return Engine(model_path=folder, **defaults | options)


def family():
    """The processes that this one's engines have started; not multiprocessing's own servers, which outlive them."""
    servers = ("pat::fork_server", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
    children = psutil.Process().children(recursive=True)
    return [child for child in children if not any(name in _command(child) for name in servers)]


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def ids(outputs):
    return [output["output_ids"] for output in outputs]


def logprobs(output):
    return [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]


def update_of(path):
    """The message by which weights come from a checkpoint."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(model_path=path)
