"""PAT: adaptive tensor parallelism for the generation stage of synchronous RLHF."""
