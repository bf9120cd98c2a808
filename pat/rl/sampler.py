"""verl's replay buffer, looked at more often and counted.

The trainer notices the end of a generation within 50 ms, not 2 s. And it does not train on a part of an iteration: verl
drops a sample whose reward raises, pads the batch and goes on.
"""

from pat.rl import verl_api as verl
from pat.rl.iteration import COUNTED, IterationError

POLL_S = 0.05


class PromptReplayBuffer(verl.ReplayBuffer):
    """For ``trainer.v1.sampler.custom_sampler``; ``sampler_kwargs.samples`` is the number of a prompt's samples."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs | {"poll_interval": POLL_S})

    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        """verl's batch, and metrics with COUNTED. Raises IterationError if a sample of the iteration is missing."""
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "val":
            return batch, metrics
        count = len({key.rpartition("_")[0] for key in batch.keys})  # PROMPT_SAMPLE_TURN
        wanted = batch_size * self.sampler_kwargs["samples"]
        if count != wanted:
            raise IterationError(
                f"iteration {global_steps}: {count} of {wanted} samples can be trained on; the generation or the "
                "reward of the others raised: see 'Error in _run_prompt' in the log"
            )
        return batch, metrics | {COUNTED: count}
