"""One verl replica: a Ray actor that holds one ``pat.Engine`` over all ranks of the replica.

verl sees one server and one uninterrupted ``generate`` a request; switches happen behind it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from pat.arms import from_config
from pat.engine.cpu import environment, processes
from pat.rl import verl_api as verl
from pat.rl.identity import Identities
from pat.rl.iteration import Iteration, lengths
from pat.rl.settings import Settings


class Server:
    """The actor. ``sleep`` ends a generation stage, ``load_weights`` begins the next one.

    A stage that lost a request fails in ``sleep``, which verl calls before it trains on the batch: verl itself
    would drop the request and go on.
    """

    def __init__(self, config, model_config, replica_rank: int, ranks: int, visible_devices: str) -> None:
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        processes.warm()
        from pat.engine.api import Engine

        self.config = verl.omega_conf_to_dataclass(config)
        self.model = verl.omega_conf_to_dataclass(model_config, dataclass_type=verl.HFModelConfig)
        self.settings = Settings.from_verl(self.config.custom, ranks)
        self.replica_rank = replica_rank
        self.cap = self.config.response_length
        self.policy = from_config(
            self.settings.policy,
            self.settings.tp_sizes,
            self.settings.policy_settings,
            self.settings.predictor,
        )
        options = dict((self.config.engine_kwargs or {}).get("sglang") or {})
        if self.settings.kv_tokens:
            options.setdefault("max_total_tokens", self.settings.kv_tokens)
        if environment.has_accelerator():  # as verl's own SGLang rollout takes these
            options.setdefault("mem_fraction_static", self.config.gpu_memory_utilization)
            options.setdefault("disable_cuda_graph", bool(self.config.enforce_eager))
        # On accelerators training and generation share the memory: each leaves it while the other works.
        self.shares_memory = environment.has_accelerator() and bool(self.config.free_cache_engine)
        if self.shares_memory:
            options["enable_memory_saver"] = True
        self.engine = Engine(
            model_path=self.model.local_path,
            ranks=ranks,
            tp_sizes=self.settings.tp_sizes,
            policy=self.policy,
            max_new_tokens=self.cap,
            dtype=self.config.dtype,
            **{
                "skip_tokenizer_init": True,
                "max_running_requests": self.config.max_num_seqs,
                "random_seed": self.settings.seed,
                "log_level": "warning",
                **options,
            },
        )
        self._begin(0)
        self._started = False

    async def launch_server(self) -> str:
        return f"pat-{self.replica_rank}-{os.getpid()}"  # processes of two nodes may have the same number

    def _begin(self, weights_version: int) -> None:
        self.global_steps = weights_version
        number, settings = weights_version + 1, self.settings
        identities = Identities(settings.seed, number, settings.lengths, self.config.n, self.replica_rank)
        self.iteration = Iteration(number, identities, settings.requests)
        self._marks = self.engine.step_marks()
        self._switches_before = len(self.engine.switches)

    # --- generation ----------------------------------------------------------------------------------------
    async def generate(
        self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None, number=None, **kwargs
    ):
        """verl's token-in, token-out request: prompt ids [tokens] -> response ids and their log-probs.

        number: what ``pat.rl.router`` adds.
        """
        if image_data or video_data:
            raise ValueError("the pat rollout generates text only")
        prompt_ids = list(prompt_ids)
        request = self.iteration.arrive(request_id, prompt_ids, number)
        params = dict(sampling_params)
        logprobs = params.pop("logprobs", False)
        budget = self.config.prompt_length + self.cap - len(prompt_ids)
        limit = params.pop("max_tokens", None) or params.pop("max_new_tokens", None) or min(self.cap, budget)
        params |= {"max_new_tokens": min(limit, request.length or limit), "sampling_seed": request.seed}
        params |= {"ignore_eos": True} if request.length else {"stop_token_ids": self._end_tokens()}
        try:
            output = await asyncio.wait_for(
                self.engine.async_generate(
                    rid=request_id, input_ids=prompt_ids, sampling_params=params, return_logprob=True
                ),
                self.settings.deadline_s,
            )
        except TimeoutError:
            self.engine.tokenizer_manager.abort_request(rid=request_id)
            request.error = f"no answer within {self.settings.deadline_s:g} s (deadline_s)"
            raise TimeoutError(request.error) from None
        except Exception as error:
            request.error = f"{type(error).__name__}: {error}"
            raise
        info = output["meta_info"]
        reason = (info.get("finish_reason") or {}).get("type")
        self.iteration.finish(request, len(output["output_ids"]), reason)
        return verl.TokenOutput(
            token_ids=output["output_ids"],
            log_probs=[entry[0] for entry in info["output_token_logprobs"]] if logprobs else None,
            stop_reason=reason,
            extra_fields={"global_steps": self.global_steps},
        )

    def _end_tokens(self) -> list[int]:
        """What SGLang may not know: verl replaces the configuration's end token by the tokenizer's."""
        named = [
            getattr(source, "eos_token_id", None) for source in (self.model.generation_config, self.model.hf_config)
        ]
        return sorted({token for ends in named for token in ([ends] if isinstance(ends, int) else ends or [])})

    # --- between generations -------------------------------------------------------------------------------
    async def sleep(self) -> None:
        """The generation stage has ended: account for it, learn from it, go back to the base layout.

        verl also calls it before the first stage. Raises IterationError if a request was lost; verl ends the job.
        """
        if self.iteration.requests:
            self.iteration.check()
            await self.engine.end_iteration()
            self._log()
            self.policy.observe(*lengths(self.iteration.record(), self.cap))
        if self.shares_memory:
            await self.engine.release_memory()

    async def load_weights(self, folder: str, global_steps: int | None) -> None:
        """Take new weights from a checkpoint folder and set up the layout of the next stage."""
        await self.engine.end_iteration()  # after a validation, which ends without sleep
        if self.shares_memory:
            await self.engine.resume_memory()
        await self.engine.update_weights(folder)
        self._begin(self.global_steps if global_steps is None else global_steps)
        if not self._started:
            self._relearn()
        await self.engine.begin_iteration(self.settings.requests)

    def _relearn(self) -> None:
        """Show the policy what earlier iterations generated here, if a training goes on from a checkpoint."""
        self._started = True
        records = sorted(self.settings.log.glob(f"*-{self.replica_rank:03d}.json")) if self.settings.log else []
        for generation in map(json.loads, map(Path.read_bytes, records)):
            if generation["iteration"] < self.iteration.number:
                self.policy.observe(*lengths(generation["requests"], self.cap))

    def _log(self) -> None:
        if not self.settings.log:
            return
        data = {
            "iteration": self.iteration.number,
            "replica": self.replica_rank,
            "clock": time.time() - time.monotonic(),  # the records of several machines meet on their wall clocks
            "requests": self.iteration.record(),
            "switches": self.engine.switches[self._switches_before :],
            "steps": self.engine.steps(self._marks).to_dict(as_series=False),
            "decision_s": self.engine.controller.decision_s,
        }
        folder = self.settings.log
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.iteration.number:06d}-{self.replica_rank:03d}.json"
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.rename(file)  # a reader never sees half a file

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.engine.tokenizer_manager.abort_request(abort_all=True)

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def _nothing(self, *args, **kwargs) -> None:
        pass

    # Memory is released in sleep and resumed in load_weights, where it is needed: nothing else to do.
    wake_up = resume_generation = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = _nothing
