"""New weights for an engine: from disk, as SGLang has it, and from tensors, through shared memory; and its memory."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from pat.engine import sglang_api as sg
from pat.engine.parameters import Given, WeightsRefused
from pat.engine.shared import shared_folder

NamedTensors = Iterable[tuple[str, torch.Tensor]]
ANSWER_S = 1.0  # an answer arrives before the rank that sent it shows that it has nothing left


class WeightUpdates:
    """Part of ``Engine``. All sizes are views of the base layout's weights, hence it goes there to load new ones.

    Like SGLang's own, an update waits until no request is unfinished and keeps new ones waiting. No switch happens
    meanwhile, by hand or by the policy. Weights whose names, shapes or number are not the model's are refused before
    anything is written, and generation goes on with the old ones. If loading fails once it has begun, generation is
    refused until all weights that it was about have been loaded.
    """

    async def update_weights(self, path: str) -> None:
        """Load new weights (a checkpoint folder) between two generations.

        Raises RuntimeError with unfinished requests, which would not be those of one policy any more, or if the
        weights are refused or cannot be loaded; TimeoutError if that takes longer than the deadline of a switch.
        """
        for _ in range(100):
            self.watch.check()
            if not self.in_flight:
                break
            await asyncio.sleep(ANSWER_S / 100)
        else:
            raise RuntimeError(f"weights cannot change under {self.in_flight} unfinished requests")
        update = self.tokenizer_manager.update_weights_from_disk(sg.UpdateWeightFromDiskReqInput(model_path=str(path)))
        result = await asyncio.wait_for(update, self.settings.switch_deadline_s)
        if not result[0]:
            raise RuntimeError(f"no new weights: {result[1]}")

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """See ``async_update_weights_from_tensor``."""
        return self.loop.run_until_complete(
            self.async_update_weights_from_tensor(named_tensors, load_format, flush_cache)
        )

    async def async_update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Load full tensors under Hugging Face's names: all of the model's parameters, or a bucket of them.

        named_tensors: (name, tensor) pairs on any device, of the shapes of the checkpoint. With more buckets to come
        flush_cache can be False until the last one; parameters that are in none keep their old values. Returns
        (whether it went well, why not), as SGLang does: False for a name that the model does not have, another shape
        or a type that is not floating point, and then nothing of the bucket is loaded. Raises ValueError for anything
        but such pairs.
        """
        if load_format is not None:
            raise ValueError(
                f"load_format={load_format!r} is not supported: give (name, tensor) pairs with full tensors"
            )
        tensors = list(named_tensors)
        if not all(isinstance(pair, tuple | list) and isinstance(pair[1], torch.Tensor) for pair in tensors):
            raise ValueError("named_tensors must be (name, tensor) pairs, not serialised tensors of one rank")
        self.watch.check()
        if not tensors:
            return True, "no tensors were given"
        given = [Given(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors]
        try:
            self.tokenizer_manager.parameters.check(given, complete=False)
        except WeightsRefused as error:
            return False, f"{error}. Nothing was loaded."
        return await asyncio.shield(asyncio.ensure_future(self._load_bucket(tensors, flush_cache)))

    async def _load_bucket(self, tensors: list[tuple[str, torch.Tensor]], flush_cache: bool) -> tuple[bool, str]:
        folder = shared_folder("tensors", sum(tensor.nbytes for _, tensor in tensors))
        self.tokenizer_manager.buckets.add(str(folder))
        try:
            await asyncio.to_thread(_write, tensors, folder)
            done = await self.tokenizer_manager.update_weights_from_disk(
                sg.UpdateWeightFromDiskReqInput(
                    model_path=str(folder), load_format="safetensors", flush_cache=flush_cache
                )
            )
            return done[0], done[1]
        finally:
            self.tokenizer_manager.buckets.discard(str(folder))
            shutil.rmtree(folder, ignore_errors=True)

    async def release_memory(self, tags: list[str] | None = None) -> None:
        """``release_memory_occupation`` for a caller in an event loop: give the ranks' memory back, by default all.

        tags: of "weights", "kv_cache" and "cuda_graph". Waits until no request is unfinished and goes to the base
        layout. Nothing can be generated and no switch made until ``resume_memory``. As in SGLang, memory is only
        given back with enable_memory_saver=True, and weights are undefined afterwards until they are loaded anew:
        nothing can be generated before that.
        Raises RuntimeError if requests are running, in a pause.
        """
        await self.tokenizer_manager.release_memory_occupation(sg.ReleaseMemoryOccupationReqInput(tags=tags))

    async def resume_memory(self, tags: list[str] | None = None) -> None:
        """Take the memory that was released, by default all of it."""
        await self.tokenizer_manager.resume_memory_occupation(sg.ResumeMemoryOccupationReqInput(tags=tags))


def _write(tensors: list[tuple[str, torch.Tensor]], folder: Path) -> None:
    """One file of the tensors, each with memory of its own: a checkpoint's format knows no tied ones."""
    seen, out = set(), {}
    for name, tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        full = full.detach().cpu().contiguous()
        memory = full.untyped_storage().data_ptr()
        out[name] = full.clone() if memory in seen or full.untyped_storage().nbytes() != full.nbytes else full
        seen.add(memory)
    save_file(out, folder / "model.safetensors")
