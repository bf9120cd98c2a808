"""A real Slurm cluster on this machine, for tests: Debian's slurmctld and munged, and several slurmd.

Every node is this machine under another name, with more cores, memory and GPUs than there are. GPUs are character
devices that do nothing. It needs root and Debian's packages (22.05 and later), but neither systemd nor cgroups:

    apt-get install --no-install-recommends slurm-wlm munge
    python -m tests.slurm.cluster sinfo          # starts one, runs the command in it, stops it

It never touches a Slurm that it has not started: see `unavailable`. Processes are ended by the ids that it recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

FOLDER = Path("/run/pat-slurm")  # short, since sockets are in it
FACTS = Path(__file__).parent / "cluster.yaml"  # what a user of it would write
SYSTEM = Path("/etc/slurm")  # where Slurm's commands look without SLURM_CONF
NAMES = ("slurm.conf", "gres.conf")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults", "sacct", "sacctmgr")
DAEMONS = ("slurmctld", "slurmd", "slurmdbd")
BASE_PORT = 16817
START_S, END_S, BUSY_S = 60.0, 15.0, 1800.0  # longest start; longest end of a process; longest wait for another session

CONFIG = """\
ClusterName=pat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,batch_sched_delay=0,bf_interval=5
SlurmdParameters=config_overrides
GresTypes=gpu
MinJobAge=3600
KillWait=2
SlurmdTimeout=10
InactiveLimit=0
{accounting}
DefMemPerCPU=1000
NodeName=pat[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} \
RealMemory={memory_mib} Gres=gpu:h200:{gpus} Feature=h200,nvlink State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=cpu Nodes=pat1 MaxTime=INFINITE State=UP
"""


class Refused(RuntimeError):
    """This machine cannot, or must not, run the cluster."""


def unavailable(accounting: bool = False) -> str | None:
    """Why no cluster, or none with accounting, may be started here; None if one may.

    A machine that has a Slurm of its own is left alone: a configuration or a running daemon that is not ours.
    """
    if os.geteuid() != 0:
        return "a test cluster needs root: it makes device files and links in /etc/slurm"
    programs = PROGRAMS + ACCOUNTING * accounting
    if missing := [program for program in programs if shutil.which(program, path=_path()) is None]:
        packages = "slurm-wlm munge" + " slurmdbd mariadb-server-core mariadb-client-core" * accounting
        return f"missing: {', '.join(missing)} (apt-get install --no-install-recommends {packages})"
    if os.environ.get("SLURM_CONF", str(FOLDER / "slurm.conf")) != str(FOLDER / "slurm.conf"):
        return f"SLURM_CONF is set to {os.environ['SLURM_CONF']}: this machine has a Slurm of its own"
    for file in [SYSTEM / name for name in NAMES] + [Path("/etc/slurm-llnl/slurm.conf")]:
        if os.path.lexists(file) and not (file.is_symlink() and os.readlink(file) == str(FOLDER / file.name)):
            return f"{file} exists: this machine has a Slurm of its own"
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in DAEMONS and not _ours(process):
            return f"{process.info['name']} is running (process {process.pid}): this machine has a Slurm of its own"
    return None


@contextlib.contextmanager
def running(nodes: int = 3, gpus: int = 8, accounting: bool = False, wait_s: float = BUSY_S) -> Iterator[Cluster]:
    """The cluster, for as long as the block lasts; SLURM_CONF and PAT_CLUSTER are set in it.

    nodes: pat1, pat2, ... with `gpus` GPUs each. accounting: with slurmdbd and MariaDB, hence sacct.
    One at a time on a machine: waits up to `wait_s` seconds for another session's to end. Raises Refused.
    """
    if (reason := unavailable(accounting)) is not None:
        raise Refused(reason)
    lock = FileLock(f"{FOLDER}.lock", timeout=wait_s)
    try:
        lock.acquire()
    except Timeout:
        raise Refused(f"another test cluster has held {lock.lock_file} for {wait_s:.0f} s") from None
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PAT_CLUSTER")}
    try:
        cluster = Cluster(nodes, gpus, accounting)
        cluster.stop()  # what a session left behind that was killed
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        lock.release()


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes with `gpus` GPUs each; use it through `running`."""

    nodes: int
    gpus: int
    accounting: bool = False
    cpus: int = 64
    memory_mib: int = 512000

    @property
    def names(self) -> list[str]:
        return [f"pat{index}" for index in range(1, self.nodes + 1)]

    def start(self) -> None:
        """Start every daemon and wait until all nodes are idle."""
        for name in ("log", "state", "spool", "dev", "munge"):
            (FOLDER / name).mkdir(parents=True, exist_ok=True)
        for folder in (FOLDER, FOLDER / "munge"):
            folder.chmod(0o755)
        os.environ["SLURM_CONF"] = str(FOLDER / "slurm.conf")
        os.environ["PAT_CLUSTER"] = str(FACTS)
        self._configure()
        # Snakemake's jobstep drops every SLURM_ variable, SLURM_CONF too, before its own srun.
        SYSTEM.mkdir(exist_ok=True)
        for name in NAMES:
            (SYSTEM / name).unlink(missing_ok=True)
            (SYSTEM / name).symlink_to(FOLDER / name)
        socket_, log = FOLDER / "munge" / "socket", FOLDER / "log" / "munged.log"
        options = [f"--key-file={FOLDER}/munge.key", f"--socket={socket_}", f"--pid-file={FOLDER}/munged.pid"]
        options += [f"--seed-file={FOLDER}/munge.seed", f"--log-file={log}", "--num-threads=2"]
        self._spawn("munged", "munged", "--foreground", "--force", *options)
        self._wait(socket_.exists, "munged")
        if self.accounting:
            self._start_accounting()
        self._spawn("slurmctld", "slurmctld", "-D")
        for name in self.names:
            (FOLDER / "spool" / name).mkdir(exist_ok=True)
            self.start_node(name)
        self._wait(lambda: self.states() == dict.fromkeys(self.names, "idle"), "the nodes")

    def start_node(self, name: str) -> None:
        self._spawn(f"slurmd-{name}", "slurmd", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """End the node's slurmd and whatever runs on it, as if its power had gone."""
        _kill([self._recorded()[f"slurmd-{name}"], *_steps(name)])

    def states(self) -> dict[str, str]:
        """State of each node, as sinfo names it; empty while slurmctld does not answer."""
        try:
            lines = self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").split("\n")
        except (subprocess.SubprocessError, OSError):
            return {}
        return dict(line.split() for line in lines if line)

    def jobs(self) -> list[dict[str, str]]:
        """Every job that slurmctld remembers, finished ones too, as `scontrol show job` tells: key and value."""
        text = self.run("scontrol", "show", "job", "--oneliner", "--all")
        lines = [line for line in text.splitlines() if line.startswith("JobId=")]
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """What a Slurm command prints. Raises subprocess.SubprocessError if it fails or takes too long."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        return done.stdout

    def stop(self) -> None:
        """End every job, then every recorded process, and remove the links in /etc/slurm and the folder."""
        if not FOLDER.exists():
            return
        recorded = self._recorded()
        if "slurmctld" in recorded and self.states():
            self._cancel()
        for name in sorted(recorded, key=lambda name: not name.startswith("slurmd-")):  # munged is asked till the end
            if name != "munged":
                _end(recorded[name])
        _kill(_steps())
        if "munged" in recorded:
            _end(recorded["munged"])
        for name in NAMES:
            if (SYSTEM / name).is_symlink() and os.readlink(SYSTEM / name) == str(FOLDER / name):
                (SYSTEM / name).unlink()
        with contextlib.suppress(OSError):
            SYSTEM.rmdir()  # unless something else is in it
        shutil.rmtree(FOLDER)

    def _cancel(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.run("scancel", "--user=root")
            end = time.monotonic() + END_S
            while time.monotonic() < end and self.run("squeue", "-h"):
                time.sleep(0.2)

    def _configure(self) -> None:
        storage = "AccountingStorageType=accounting_storage/none"
        if self.accounting:
            storage = (
                "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
                f"AccountingStoragePort={BASE_PORT + 2}\nAccountingStoragePass={FOLDER}/munge/socket\n"
                "AccountingStorageTRES=gres/gpu"
            )
        first, last = BASE_PORT + 101, BASE_PORT + 100 + self.nodes
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            port=BASE_PORT,
            folder=FOLDER,
            accounting=storage,
            nodes=self.nodes,
            first=first,
            last=last,
            cpus=self.cpus,
            memory_mib=self.memory_mib,
            gpus=self.gpus,
        )
        if self.nodes == 1:  # Slurm takes no list of one
            text = text.replace("pat[1-1]", "pat1").replace(f"[{first}-{last}]", str(first))
        (FOLDER / "slurm.conf").write_text(text)
        (FOLDER / "gres.conf").write_text(f"Name=gpu Type=h200 File={FOLDER}/dev/gpu[0-{self.gpus - 1}]\n")
        for index in range(self.gpus):  # as /dev/null; slurmd refuses regular files
            device = FOLDER / "dev" / f"gpu{index}"
            if not device.is_char_device():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        key = FOLDER / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(1024))

    def _start_accounting(self) -> None:
        """slurmdbd on a MariaDB of its own. Needs Debian's slurmdbd, mariadb-server-core and mariadb-client-core."""
        data, run = FOLDER / "mysql", FOLDER / "mysqlrun"
        for folder in (data, run):
            folder.mkdir()
        make = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
        subprocess.run(
            [*make, "--auth-root-authentication-method=socket"], check=True, capture_output=True, timeout=START_S
        )
        options = ["--no-defaults", "--user=root", f"--datadir={data}", f"--socket={run}/socket", "--skip-networking"]
        options += [f"--pid-file={run}/pid", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
        self._spawn("mariadbd", "mariadbd", *options)
        self._wait((run / "socket").exists, "mariadbd")
        config = FOLDER / "slurmdbd.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={FOLDER}/munge/socket\n"
            f"DbdHost={socket.gethostname().partition('.')[0]}\nDbdAddr=127.0.0.1\nDbdPort={BASE_PORT + 2}\n"
            "SlurmUser=root\nStorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\n"
            f"StorageLoc=slurm_acct_db\nLogFile={FOLDER}/log/slurmdbd.log\nPidFile={FOLDER}/slurmdbd.pid\n"
        )
        self._spawn("slurmdbd", "slurmdbd", "-D", env={"MYSQL_UNIX_PORT": f"{run}/socket"})

        def answers() -> bool:
            return subprocess.run(["sacctmgr", "-n", "list", "cluster"], capture_output=True).returncode == 0

        self._wait(answers, "slurmdbd")
        for words in ("cluster pat", "account pat", "user root account=pat"):
            self.run("sacctmgr", "-i", "add", *words.split())

    def _spawn(self, name: str, *command: str, env: dict[str, str] | None = None) -> None:
        """Start a daemon in the foreground, in a session of its own, and record its process."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        environment |= {"PATH": _path(), "SLURM_CONF": str(FOLDER / "slurm.conf")} | (env or {})
        with open(FOLDER / "log" / f"{name}.out", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        _daemons.append(process)
        record = {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
        (FOLDER / f"{name}.json").write_text(json.dumps(record))

    def _recorded(self) -> dict[str, psutil.Process]:
        """Daemons that were started and still run, by name."""
        found = {}
        for file in FOLDER.glob("*.json"):
            record = json.loads(file.read_text())
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record["pid"])
                if abs(process.create_time() - record["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                    found[file.stem] = process
        return found

    def _wait(self, done, what: str) -> None:
        end = time.monotonic() + START_S
        started = {file.stem for file in FOLDER.glob("*.json")}
        while not done():
            if dead := started - self._recorded().keys():
                name = min(dead)
                texts = [file.read_text()[-1500:] for file in sorted((FOLDER / "log").glob(f"{name}.*"))]
                raise Refused(f"{name} ended: {' '.join(texts)}")
            if time.monotonic() > end:
                raise Refused(f"{what}: not ready after {START_S:.0f} s; states: {self.states()}")
            time.sleep(0.1)


_daemons: list[subprocess.Popen] = []  # ours to reap


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get("SLURM_CONF") == str(FOLDER / "slurm.conf")
    except psutil.Error:
        return True  # it has just ended


def _steps(node: str | None = None) -> list[psutil.Process]:
    """What runs jobs, on one node or all, and the jobs' processes; it outlives the slurmd that started it.

    By the environment of the jobs' processes: slurmstepd overwrites its own with its title.
    """
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "slurmstepd":
            with contextlib.suppress(psutil.Error):
                inside = [child.environ() for child in process.children()]
                if any(_is_of(environment, node) for environment in inside):
                    found += [process, *process.children(recursive=True)]
    return found


def _is_of(environment: dict[str, str], node: str | None) -> bool:
    ours = environment.get("SLURM_CLUSTER_NAME") == "pat"
    return ours and node in (None, environment.get("SLURMD_NODENAME"))


def _kill(processes: list[psutil.Process]) -> None:
    """End all at once, so that none notices that another has gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for process in processes:
        _reap(process, END_S)


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.terminate()
        _reap(process, END_S)
        if process.is_running():
            process.kill()
            _reap(process, END_S)


def _reap(process: psutil.Process, wait_s: float) -> None:
    child = next((each for each in _daemons if each.pid == process.pid), None)
    with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
        (child or process).wait(timeout=wait_s)


def main() -> int:
    command = sys.argv[1:] or ["sinfo", "--Node", "--long"]
    with running() as cluster:
        print(f"cluster of {', '.join(cluster.names)} with {cluster.gpus} GPUs each", file=sys.stderr, flush=True)
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
