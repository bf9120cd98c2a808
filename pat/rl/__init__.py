"""PAT inside verl: rollout replica, CPU platform, metrics, training."""
