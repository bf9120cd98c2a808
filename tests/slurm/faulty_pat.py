"""Stands in for the stages of `pat` where a test wants them to end badly, on a real Slurm under the real workflow.

`pat logged` is the real one. A stage leaves files of a few bytes and its name in runs.txt, but for what FAULTS.json
says of its experiment: fail, hang (until it is ended), eat (memory), fill (the disk), or once (hang the first time).
"""

import json
import os
import sys
import time
from pathlib import Path

OUTPUTS = {
    "assets": ["model/config.json", "data/train.parquet", "data/val.parquet"],
    "profile": [
        f"profile/{name}"
        for name in (
            "decode.parquet",
            "prefill.parquet",
            "switch.parquet",
            "transfer.parquet",
            "generation.parquet",
            "machine.json",
        )
    ],
}


def stage(name: str, folder: Path) -> None:
    faults = json.loads(Path("FAULTS.json").read_text())
    fault = faults.get(folder.name, "") if name == faults.get("stage", "assets") else ""
    with open("runs.txt", "a") as runs:
        runs.write(f"{name} {folder.name} {os.environ.get('SLURM_JOB_ID')} {os.environ.get('SLURMD_NODENAME')}\n")
    for file in OUTPUTS[name]:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("half")
    if fault == "fail":
        raise ValueError("the prompts are of another model")
    if fault == "eat":
        eaten = bytearray(3 << 30)
        eaten[:: 1 << 12] = b"x" * len(eaten[:: 1 << 12])
    if fault == "fill":
        (folder / OUTPUTS[name][0]).write_bytes(bytes(64 << 20))
    if fault == "once" and Path("runs.txt").read_text().count(f"{name} {folder.name} ") > 1:
        fault = ""
    if fault in ("hang", "eat", "once"):
        time.sleep(600)
    for file in OUTPUTS[name]:
        (folder / file).write_text("whole")


def main() -> int:
    if sys.argv[1] == "logged":
        from pat.logged import run

        log, *rest = sys.argv[2:]
        return run([sys.executable, __file__, *rest], Path(log), f"pat {' '.join(rest)}")
    options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    stage(sys.argv[1], Path(options["--config"]).parent.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
