"""Where a response ends: the end tokens of a checkpoint, and its generation_config, which names them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from pat.model import BUILTIN, UnsupportedModel


def of(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
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


def texts(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What a decoded response shows of its end token: of those that are no special tokens, their text."""
    known = [token for token in tokens if token < len(tokenizer)]
    return [text for token in known if (text := tokenizer.decode([token], skip_special_tokens=True))]


def savable(generation: GenerationConfig) -> GenerationConfig:
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
