"""SGLang's tokenizer manager, through which all that is asked of an engine goes.

It waits for no process that has ended, loads weights in the base layout only, and refuses what PAT cannot carry
across a switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from pat.engine import checkpoint, refusals
from pat.engine import sglang_api as sg
from pat.engine.ordering import InOrder
from pat.engine.parameters import Parameters, WeightsRefused
from pat.engine.sampling import next_sample
from pat.engine.shared import is_shared_folder
from pat.engine.unsupported import BY_RANK, refusing
from pat.engine.watch import Communicator, Watch, ring_all

log = logging.getLogger(__name__)

FLUSH_S = 30.0  # a rank that has answered its last request is idle a step later
FLUSH_POLL_S = 0.02  # seconds between tries to flush
SEED = 42  # of a request without one, in SGLang's deterministic mode
ORDER_POLL_S = 1.0  # seconds between looks whether outputs are held up for too long


class TokenizerManager(sg.TokenizerManager):
    """watch: of the engine's processes. switching: held while the layout changes. at_base: a context in which the
    engine is, and stays, in its base layout. deadline_s: longest that an output may wait for those before it, seconds.
    parameters: what weights must be. buckets: folders with a part of them, of an update that is one of several.
    """

    def __init__(
        self,
        server_args,
        port_args,
        *,
        watch: Watch,
        switching: asyncio.Lock,
        at_base: Callable[[], AbstractAsyncContextManager],
        deadline_s: float,
        parameters: Parameters,
    ) -> None:
        self.watch, self.switching, self.at_base = watch, switching, at_base
        self.in_order = InOrder(self._tokens_so_far, deadline_s)
        self.parameters = parameters
        self.buckets: set[str] = set()
        self.undefined: set[str] = set()  # parameters that are neither the old nor the new ones
        self.failure = ""  # why
        self.updating = False  # whether an update is about to load them
        self.released: set[str] = set()  # kinds of memory that the ranks have given back
        self.sent = 0  # requests that went to the ranks, ever
        super().__init__(server_args, port_args)

    # --- requests and their answers ------------------------------------------------------------------------
    def _create_tokenized_object(self, obj, input_text, input_ids, *args, **kwargs):
        refusals.check_token_ids(input_ids, self.model_config.vocab_size)
        return super()._create_tokenized_object(obj, input_text, input_ids, *args, **kwargs)

    def _tokens_so_far(self, rid: str) -> int | None:
        state = self.rid_to_state.get(rid)
        return len(state.output_ids) if state else None

    async def _handle_batch_output(self, recv_obj) -> None:
        """Of outputs that two ranks have sent before and after a switch, the earlier ones first."""
        for message in self.in_order.ready(recv_obj):
            await super()._handle_batch_output(message)

    async def _check_order(self) -> None:
        while True:
            await asyncio.sleep(ORDER_POLL_S)
            self.in_order.check()

    # --- what waits ends with the engine -------------------------------------------------------------------
    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self.signal_handler_class = Signals
        for name, value in list(vars(self).items()):
            if isinstance(value, sg.FanOutCommunicator):
                setattr(self, name, Communicator(self.watch, value))

    async def generate_request(self, obj, request=None):
        refusals.check_request(obj)
        self.check_memory()
        if not self.updating:  # else it waits for the new weights, as in SGLang
            self.check_weights_defined()
        answers = super().generate_request(obj, request)
        try:
            while True:
                try:
                    answer = await self.watch.outlive(answers.__anext__())
                except StopAsyncIteration:
                    return
                yield answer
        finally:
            await answers.aclose()

    async def _send_one_request(self, tokenized_obj) -> None:
        await super()._send_one_request(tokenized_obj)
        # SGLang sends one and the same object as the parameters of each of n samples, which would all be equal.
        params = tokenized_obj.sampling_params
        seed = params.sampling_seed
        if seed is None and self.server_args.enable_deterministic_inference:
            seed = SEED
        if params.n > 1 and seed is not None:
            params.sampling_seed = next_sample(seed)

    def _dispatch_to_scheduler(self, obj) -> None:
        self.watch.check()
        self._note_work(obj)
        super()._dispatch_to_scheduler(obj)

    def _note_work(self, obj) -> None:
        """Count requests. One may have waited here while memory was released or weights were loaded."""
        if "Tokenized" in type(obj).__name__:
            self.check_memory()
            self.check_weights_defined()
            self.sent += len(getattr(obj, "batch", [obj]))

    async def _async_dispatch_to_scheduler(self, obj) -> None:
        self._note_work(obj)
        await self.watch.outlive(super()._async_dispatch_to_scheduler(obj))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if self.watch.death is None:  # else there is nothing to abort; SGLang does so for each request that fails
            super().abort_request(rid, abort_all)

    async def handle_loop(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(super().handle_loop())
                tasks.create_task(self._check_order())
        except ExceptionGroup as group:  # SGLang would end this process, which is the user's
            error = group.exceptions[0]
            log.exception("PAT: reading the answers of the engine's processes failed")
            reason = f"reading the answers of its processes failed: {type(error).__name__}: {error}"
            await asyncio.to_thread(self.watch.declare_dead, reason)

    def auto_create_handle_loop(self) -> None:
        if self.event_loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError(
                "the engine's answers arrive in the event loop of the first call to it, which is another one: make "
                "all calls in one loop (one asyncio.run around all of them, or only blocking methods)"
            )
        super().auto_create_handle_loop()

    # --- cache ---------------------------------------------------------------------------------------------
    async def flush_cache(self, timeout_s: float | None = None):
        """SGLang's: empty the prefix cache of all ranks, within ``timeout_s`` seconds once they have no request.

        Switches go on meanwhile.
        """
        self.auto_create_handle_loop()
        return await self._flush(timeout_s or 0, self.switching)

    async def _flush(self, timeout_s: float, switching: AbstractAsyncContextManager | None = None):
        """Flush with tries of its own: left to wait at a rank, it would be of the layout in which it was asked.

        Ranks that a switch makes one replica would flush at different steps. switching: held during each try; None:
        the caller holds it. Returns what the first rank that failed has answered, or else any.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            last = time.monotonic() >= deadline
            # Else some rank is busy, and would log that. To a caller that keeps requests waiting they are no reason.
            if last or switching is None or self.is_pause or not self.rid_to_state:
                async with switching or contextlib.nullcontext():
                    answers = await self.flush_cache_communicator(sg.FlushCacheReqInput())
                failed = next((answer for answer in answers if not answer.success), None)
                if last or failed is None:
                    return failed or answers[0]
            await asyncio.sleep(FLUSH_POLL_S)

    # --- weights -------------------------------------------------------------------------------------------
    def check_weights_defined(self) -> None:
        """Raise RuntimeError if parameters are undefined, until new ones have been loaded in their place."""
        if self.undefined:
            count = f"{len(self.undefined)} of the model's {len(self.parameters.required)} tensors"
            raise RuntimeError(
                f"{count} ({min(self.undefined)}, ...) are undefined until they are loaded: {self.failure}"
            )

    async def update_weights_from_disk(self, obj, request=None):
        if obj.load_format is None and self.config_value("load_format") == "dummy":
            obj.load_format = "auto"  # the weights that it started with came from no file, these do
        update = asyncio.ensure_future(super().update_weights_from_disk(obj, request))
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:
            if not self.updating:
                update.cancel()
            raise  # one that has begun goes on to its end, and keeps new requests waiting as long

    async def _wait_for_model_update_from_disk(self, obj):
        """SGLang calls it when no request is unfinished, and keeps new ones waiting; or while it is paused.

        Refused before anything is written if the files do not hold the model's parameters.
        """
        self.watch.check()  # first: of a dead engine nothing else matters
        try:
            names = await asyncio.to_thread(self._check_files, obj.model_path, obj.load_format)
        except WeightsRefused as error:
            return False, f"{obj.model_path}: {error}. Nothing was loaded.", 0
        async with self.at_base():
            flush, obj.flush_cache = obj.flush_cache, obj.flush_cache and self.is_pause
            self.undefined |= names
            self.failure, self.updating = f"an update from {obj.model_path} has not ended", True
            try:
                done = await self.watch.outlive(super()._wait_for_model_update_from_disk(obj))
                if not done[0]:
                    failed = "; ".join(said for said in done[1].split(" | ") if "rank" in said) or done[1]
                    self.failure = f"an update failed ({failed})"
                    return False, f"{failed}. The weights are undefined until all of them are loaded.", done[2]
                self.undefined -= names
                # Not together with the update: an answer can arrive here before the rank that sent it is idle.
                if flush and not self.is_pause and not (await self._flush(FLUSH_S)).success:
                    return False, f"the cache of the old weights could not be flushed within {FLUSH_S:g} s", done[2]
                return done
            finally:
                obj.flush_cache, self.updating = flush, False

    def _check_files(self, path: str, load_format: str) -> frozenset[str]:
        """Names of the parameters in a checkpoint. Raises WeightsRefused if they are not the model's."""
        args = self.server_args
        found = checkpoint.tensors(path, load_format, args.revision, args.download_dir)
        return self.parameters.check(found, complete=path not in self.buckets)

    async def check_weights(self, obj, request=None):
        """SGLang's, in the base layout. Only its checksum: its other actions write to the weights or keep a copy."""
        if obj.action != "checksum":
            raise ValueError(f"check_weights: action {obj.action!r} is not supported: allowed is checksum")
        async with self.at_base():
            return await super().check_weights(obj, request)

    update_weights_from_tensor = refusing("tokenizer_manager.update_weights_from_tensor", BY_RANK)
    update_weights_from_distributed = refusing("tokenizer_manager.update_weights_from_distributed", BY_RANK)
    update_weights_from_ipc = refusing("tokenizer_manager.update_weights_from_ipc", BY_RANK)

    async def continue_generation(self, obj):
        self.check_weights_defined()
        await super().continue_generation(obj)

    async def _weight_update_session_call(self, communicator, obj):
        async def call(obj):
            async with self.at_base():
                return await communicator(obj)

        return await super()._weight_update_session_call(call, obj)

    def _update_model_path_info(self, model_path: str, load_format: str) -> None:
        if not is_shared_folder(model_path):  # handed over in shared memory, which is gone when they are loaded
            super()._update_model_path_info(model_path, load_format)

    # --- memory --------------------------------------------------------------------------------------------
    def check_memory(self) -> None:
        """Raise RuntimeError if memory that generation needs has been released."""
        if self.released:
            raise RuntimeError(f"{', '.join(sorted(self.released))} of the engine are released: resume them first")

    async def release_memory_occupation(self, obj, request=None) -> None:
        """SGLang's, once no request is unfinished (or in a pause), in the base layout, of what is not released yet.

        Other sizes are views of what comes back at the same addresses.
        """
        tags = set(obj.tags or sg.GPU_MEMORY_ALL_TYPES) - self.released
        if not tags:
            return
        obj.tags = sorted(tags)
        unfinished = contextlib.nullcontext() if self.is_pause else self.model_update_lock.writer_lock
        async with unfinished, self.at_base():
            # A rank asserts that it is idle, and would end the engine if it were not.
            if not (await self._flush(0 if self.is_pause else FLUSH_S)).success:
                raise RuntimeError("memory cannot be released: requests are still running")
            await super().release_memory_occupation(obj, request)
            self.released |= tags

    async def resume_memory_occupation(self, obj, request=None) -> None:
        """SGLang's, of what is released."""
        tags = set(obj.tags or sg.GPU_MEMORY_ALL_TYPES) & self.released
        if tags:
            obj.tags = sorted(tags)
            await super().resume_memory_occupation(obj, request)
            self.released -= tags
            saved = self.server_args.enable_memory_saver and not self.server_args.enable_weights_cpu_backup
            if saved and "weights" in tags:
                self.undefined |= self.parameters.required
                self.failure = "their memory was released"


class Signals(sg.SignalHandler):
    """SIGQUIT, by which SGLang's processes report a failure, ends this process no more."""

    def running_phase_sigquit_handler(self, signum=None, frame=None) -> None:
        ring_all()
