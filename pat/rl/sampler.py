"""verl's replay buffer, looked at more often: the trainer notices the end of a generation within 50 ms, not 2 s."""

from pat.rl import verl_api as verl

POLL_S = 0.05


class PromptReplayBuffer(verl.ReplayBuffer):
    """For ``trainer.v1.sampler.custom_sampler``; verl's default interval would quantise ``timing_s/gen``."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs | {"poll_interval": POLL_S})
