"""What the files of a checkpoint hold, read from their headers: no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pat.engine import sglang_api as sg
from pat.engine.parameters import Given, Parameters, WeightsRefused

# The files that SGLang's DefaultModelLoader takes: those of the first pattern that a folder has any of.
PATTERNS = {
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
INDEX = "model.safetensors.index.json"


def parameters_of(config: Mapping[str, Any]) -> Parameters:
    """Of the model of a ``config.json``; what it leaves out is as its family has it."""
    from transformers import CONFIG_MAPPING

    return Parameters(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict())


def check_complete(parameters: Parameters, options: Mapping[str, Any]) -> None:
    """Raise WeightsRefused unless the checkpoint that an engine with ``options`` starts from has what it needs.

    SGLang would start without what is missing.
    """
    path, load_format = options["model_path"], options.get("load_format") or "auto"
    if load_format == "dummy":
        return
    try:
        found = tensors(path, load_format, options.get("revision"), options.get("download_dir"))
        parameters.check(found, complete=True)
    except WeightsRefused as error:
        raise WeightsRefused(f"{path}: {error}") from error


def tensors(
    path: str, load_format: str, revision: str | None = None, download_dir: str | None = None
) -> Iterator[Given]:
    """The tensors in the checkpoint ``path``, a folder or a hub name (which is downloaded, as SGLang would).

    Raises WeightsRefused if there is none or a file cannot be read.
    """
    for file in files(path, load_format, revision, download_dir):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118, it is no mapping
                        view = opened.get_slice(name)
                        yield Given(name, tuple(view.get_shape()), view.get_dtype(), file.name)
            else:
                for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
                    yield Given(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file.name)
        except (OSError, SafetensorError, RuntimeError, AttributeError, EOFError) as error:
            raise WeightsRefused(f"{file} cannot be read as weights: {error}") from error


def files(path: str, load_format: str, revision: str | None = None, download_dir: str | None = None) -> list[Path]:
    """The files of a checkpoint that SGLang will load. Raises WeightsRefused if there are none."""
    if load_format not in PATTERNS:
        raise WeightsRefused(f"load_format={load_format!r} has no files: allowed are {', '.join(PATTERNS)}")
    patterns, folder = PATTERNS[load_format], Path(path)
    try:
        if not folder.is_dir():
            folder = Path(sg.download_weights_from_hf(path, download_dir, list(patterns), revision))
        found = next((names for one in patterns if (names := sorted(map(str, folder.glob(one))))), [])
        if found and found[0].endswith(".safetensors"):
            found = sg.filter_duplicate_safetensors_files(found, str(folder), INDEX)
        else:
            found = sg.filter_files_not_needed_for_inference(found)
    except Exception as error:  # of the hub's client, too, which raises a dozen kinds
        raise WeightsRefused(f"no checkpoint folder, and no model of a hub: {' '.join(str(error).split())}") from error
    if not found:
        raise WeightsRefused(f"no weights there: no file {' or '.join(patterns)}")
    return [Path(name) for name in found]
