"""Stage ``assets``: the model and the prompts that every later stage uses."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from pat.problems import ConfigError, Problem, shown


def run(cfg, experiment_dir: Path) -> None:
    """Write ``model/`` and ``data/{train,val}.parquet`` under ``experiment_dir``.

    Both appear only when complete. Raises ConfigError, with what to change, if a model cannot be divided as asked, if
    a prompt cannot be used or if too few are left; RuntimeError if padding changed the model.
    """
    from pat.assets import data, models

    scratch = experiment_dir / ".assets"
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "data").mkdir(parents=True)
    source = cfg.data.source
    with _explained("model", cfg.model.source):
        tokenizer = models.load_tokenizer(cfg.model.source)

    def length(messages: list) -> int:
        return len(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    with _explained("data", source):  # before the model, which may be large
        frames = data.split(
            source,
            cfg.data.train_size,
            cfg.data.val_size,
            cfg.data.seed,
            length,
            cfg.rollout.max_prompt,
            cfg.own_reward,
        )
        if (left := frames["train"].height) < cfg.rollout.prompts:
            raise ValueError(
                f"at least rollout.prompts = {cfg.rollout.prompts} prompts to train on; {left} are left: raise "
                "data.train_size or rollout.max_prompt"
            )
    with _explained("model", cfg.model.source):
        models.write(cfg.model.source, cfg.model.dtype, cfg.tp_sizes, cfg.seed, scratch / "model", tokenizer)
    for name, frame in frames.items():
        frame.write_parquet(scratch / "data" / f"{name}.parquet", compression="zstd")
    for name in ("model", "data"):
        shutil.rmtree(experiment_dir / name, ignore_errors=True)
        (scratch / name).rename(experiment_dir / name)
    scratch.rmdir()


@contextlib.contextmanager
def _explained(section: str, source: str) -> Iterator[None]:
    """ValueError, which says what is allowed, as an error of the key SECTION.source."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(Problem((section, "source"), shown(source), str(error))) from None
