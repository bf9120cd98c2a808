"""Stage ``assets``: the model and the prompts that every later stage uses."""

from __future__ import annotations

import shutil
from pathlib import Path


def run(cfg, experiment_dir: Path) -> None:
    """Write ``model/`` and ``data/{train,val}.parquet`` under ``experiment_dir``.

    Both appear only when complete. Raises ValueError or RuntimeError, with what to change, if a model cannot
    be divided as asked or too few prompts are left.
    """
    from pat.assets import data, models

    scratch = experiment_dir / ".assets"
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "data").mkdir(parents=True)
    tokenizer = models.write(cfg.model.source, cfg.model.dtype, cfg.tp_sizes, cfg.seed, scratch / "model")

    def length(messages: list) -> int:
        return len(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    frames = data.split(
        cfg.data.source, cfg.data.train_size, cfg.data.val_size, cfg.data.seed, length, cfg.rollout.max_prompt
    )
    if frames["train"].height < cfg.rollout.prompts:
        raise ValueError(
            f"data.source {cfg.data.source} leaves {frames['train'].height} prompts to train on, fewer than "
            f"rollout.prompts = {cfg.rollout.prompts}; raise data.train_size or rollout.max_prompt"
        )
    for name, frame in frames.items():
        frame.write_parquet(scratch / "data" / f"{name}.parquet", compression="zstd")
    for name in ("model", "data"):
        shutil.rmtree(experiment_dir / name, ignore_errors=True)
        (scratch / name).rename(experiment_dir / name)
    scratch.rmdir()
