"""``pat gpu-check``: what a machine with GPUs says about PAT, in ten minutes and one JSON file.

Decode steps of PAT's engine at every size and of SGLang's own at that size, switches with requests in flight, memory
of the graphs, and the tests that need a GPU. Weights are random: only the shape of the model counts. Each part is a
process of its own with a limit of its own; what failed, took too long or could not be run is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from pat import cluster
from pat.gpu_check.report import Machine, Part, Report, Test

ROOT = Path(__file__).parents[2]
MEASURE = (sys.executable, "-m", "pat.gpu_check.measure")
LIMIT_S = {"pat": 180.0, "stock": 120.0, "tests": 420.0}
TESTS_S = 180.0  # are kept for the tests, which come last
# Llama-3.1-8B: what the published tables are about. And one that a CPU runs in seconds.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
TINY = LLAMA | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


def run(out: Path, model: Path | None = None, cpu: bool = False, minutes: float = 10.0) -> bool:
    """Write the report to ``out``; a line a result is printed. True if nothing failed.

    model: folder of a config.json whose shape is used. cpu: the same on this machine's cores and a tiny model, which
    tries the check itself. Raises RuntimeError without a GPU.
    """
    gpus = 0 if cpu else _gpus()
    if not cpu and not gpus:
        raise RuntimeError("no GPU that torch can use on this machine: --cpu tries the check itself on a tiny model")
    check = _Check(time.monotonic() + 60 * minutes, cpu, gpus)
    report = check.run(
        json.loads((model / "config.json").read_text(encoding="utf-8")) if model else TINY if cpu else LLAMA
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    bad = [f"{part.name}: {part.outcome}, {part.why}" for part in report.parts if part.outcome != "done"]
    bad += [f"failed: {test.name}" for test in report.tests if test.outcome == "failed"]
    print("\n".join(bad), end="\n" if bad else "")
    print(f"gpu-check: {'nothing failed' if report.ok else 'something failed'}; send {out}", flush=True)
    return report.ok


class _Check:
    def __init__(self, deadline: float, cpu: bool, gpus: int) -> None:
        self.deadline, self.cpu = deadline, cpu
        self.one_device = gpus == 1
        # Sizes up to the GPUs there are; on one, two ranks share it.
        largest = 2 if cpu or self.one_device else 1 << (gpus.bit_length() - 1)
        self.sizes = [1 << power for power in range(largest.bit_length())]
        self.parts: list[Part] = []

    def run(self, config: dict) -> Report:
        decode, tests, switches, memory = [], [], [], {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            plan = {
                "model": name,
                "dtype": "float32" if self.cpu else "bfloat16",
                "tokens": 4096 if self.cpu else 16384,
                "tp_sizes": self.sizes,
                "one_device": self.one_device,
                "batches": [1, 4] if self.cpu else [1, 8, 64],
                "repeats": 2 if self.cpu else 3,
                "switch_tokens": 400 if self.cpu else 1000,
            }
            if found := self._part("pat", folder, plan):
                decode += found["decode"]
                switches, memory = found["switches"], found["graph_memory_bytes"]
            for tp in self.sizes:
                if self.one_device and tp > 1:
                    self.parts.append(
                        Part(name=f"stock tp {tp}", outcome="not run", why=f"needs {tp} GPUs, there is 1")
                    )
                elif found := self._part("stock", folder, plan | {"tp": tp}, f"stock tp {tp}"):
                    decode += found["decode"]
            tests = self._tests(folder)
        failed = [each for each in (*self.parts, *tests) if each.outcome == "failed"]
        return Report(
            ok=not failed,
            device="cpu" if self.cpu else "cuda",
            one_device=self.one_device,
            model=config,
            machine=machine(),
            parts=self.parts,
            tests=tests,
            decode=decode,
            switches=switches,
            graph_memory_bytes=memory,
        )

    def _tests(self, folder: Path) -> list[Test]:
        file, lines = ROOT / "tests" / "engine" / "test_gpu.py", folder / "lines"
        if not file.exists():
            why = f"{file} is not there: run it in a clone of the repository"
            self.parts.append(Part(name="tests", outcome="failed", why=why))
            return []
        # On a CPU those of the devices stand in, which take seconds.
        where = [str(file.with_name("test_device.py") if self.cpu else file)]
        plan = {"tests": where, "marker": "not gpu" if self.cpu else "gpu", "lines": str(lines)}
        self._part("tests", folder, plan)
        rows = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
        found = [Test.model_validate_json(row) for row in rows]
        if self.parts[-1].outcome == "done" and not any(test.outcome == "passed" for test in found):
            self.parts[-1] = Part(name="tests", outcome="failed", why="no test passed: each was skipped or failed")
        return found

    def _part(self, part: str, folder: Path, plan: dict, name: str | None = None) -> dict | None:
        """What a process of its own has found; None if it failed or took too long."""
        name, begin = name or part, time.monotonic()
        limit = min(LIMIT_S[part], self.deadline - begin - (0 if part == "tests" else TESTS_S))
        if limit < 5:
            self.parts.append(Part(name=name, outcome="failed", why="no time was left"))
            return None
        print(f"gpu-check: {name}, at most {limit:.0f} s", flush=True)
        out, log, orders = folder / "out", folder / "log", folder / "plan"
        out.unlink(missing_ok=True)
        orders.write_text(json.dumps(plan | {"out": str(out)}), encoding="utf-8")
        with log.open("w", encoding="utf-8") as errors:
            child = subprocess.Popen([*MEASURE, part, str(orders)], stderr=errors, cwd=ROOT, start_new_session=True)
            try:
                status, why = child.wait(limit), ""
                if status:
                    why = f"exit status {status}: {log.read_text(encoding='utf-8').strip()[-2000:]}"
            except subprocess.TimeoutExpired:
                why = f"took longer than {limit:.0f} s: {log.read_text(encoding='utf-8').strip()[-500:]}"
            finally:
                _end(child)
        if why:
            print(f"gpu-check: {name} failed: {why.splitlines()[-1]}", flush=True)
        found = json.loads(out.read_text(encoding="utf-8")) if not why else None
        seconds = time.monotonic() - begin
        self.parts.append(Part(name=name, outcome="failed" if why else "done", seconds=seconds, why=why))
        return found


def _end(child: subprocess.Popen) -> None:
    """End a part and all that it has started."""
    left = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its own session
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def _gpus() -> int:
    """GPUs that torch can use, counted in another process: this one must not hold any."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    text = cluster.output(sys.executable, "-c", code)
    return int(text.split()[-1]) if text else 0


def machine() -> Machine:
    """This machine."""
    here = cluster.from_machine()[0]
    drivers = cluster.output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    cuda = cluster.output(sys.executable, "-c", "import torch; print(torch.version.cuda)")
    versions = cluster.versions() | _version("flashinfer-python") | _version("sglang-kernel")
    return Machine(
        cpu=cluster.cpu_model(),
        gpus=[device["name"] for device in here["devices"]],
        driver=drivers.split()[0] if drivers else None,
        cuda=cuda.strip() if cuda and "None" not in cuda else None,
        links=here["links"],
        versions=versions,
    )


def _version(package: str) -> dict[str, str | None]:
    try:
        return {package: version(package)}
    except PackageNotFoundError:
        return {package: None}
