"""The rollout ``pat`` as verl knows rollouts: a replica (in the driver) and an adapter (in each worker)."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import ray
import torch
from safetensors.torch import save_file

from pat.engine.device import named_once
from pat.engine.shared import require_room, shared_folder
from pat.rl import verl_api as verl
from pat.rl.server import Server

BUCKET_BYTES = 512 << 20


class Replica(verl.RolloutReplica):
    """All ranks of one replica belong to one ``Server``; verl's tensor_model_parallel_size is their number.

    Raises ValueError if the replica spans nodes: a switch moves KV inside one node.
    """

    async def launch_servers(self) -> None:
        if self.nnodes > 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={self.world_size} spans {self.nnodes} nodes of "
                f"{self.gpus_per_node} ranks: allowed are divisors of {self.gpus_per_node}"
            )
        where = await asyncio.gather(*[worker.__ray_call__.remote(_whereabouts) for worker in self.workers])
        if len({node for node, _ in where}) > 1:
            raise ValueError(
                f"Ray has put the {self.world_size} ranks of one replica on several nodes: each node needs as many"
            )
        devices = named_once(visible for _, visible in where)
        server = (
            ray.remote(Server)
            .options(
                name=_server_name(self.replica_rank),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id=where[0][0], soft=False
                ),
                # Ray would hide the devices from an actor that asks for none.
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            )
            .remote(
                self.config,
                self.model_config,
                self.replica_rank,
                self.world_size,
                ",".join(devices),
            )
        )
        self.servers = [server]
        self._server_handle, self._server_address = server, await server.launch_server.remote()


def _whereabouts(worker) -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def _server_name(replica_rank: int) -> str:
    return f"pat_server_{replica_rank}"


class Adapter(verl.BaseRollout):
    """In each training worker: hands the trained weights to the replica's server."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks, rank = self.config.tensor_model_parallel_size, int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self.is_leader = rank % ranks == 0
        self._server = None

    @property
    def server(self):
        self._server = self._server or ray.get_actor(_server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        if self.is_leader:
            await self.server.sleep.remote()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, **kwargs
    ) -> None:
        """Write the full tensors to shared memory and let the server load them: one load an update.

        All ranks must run through ``weights`` (each item is gathered from all of them); the leader writes.
        """
        if not self.is_leader:
            for _ in _full_tensors(weights):
                pass
            return
        # What comes is counted bucket by bucket; it is about as much as the checkpoint that training began with.
        checkpoint = Path(self.model_config.local_path)
        folder = shared_folder("weights", sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")))
        try:
            for number, bucket in enumerate(_buckets(_full_tensors(weights))):
                require_room(folder, "a bucket of new weights", sum(tensor.nbytes for tensor in bucket.values()))
                save_file(bucket, folder / f"model-{number:05d}.safetensors")
            for file in checkpoint.glob("*.json"):
                if "index" not in file.name:
                    shutil.copy(file, folder)
            await self.server.load_weights.remote(str(folder), global_steps)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _full_tensors(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        yield name, full.detach().cpu().contiguous().clone()


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    bucket, size = {}, 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
