"""A real SLURM cluster of two nodes on one host, for tests: its own munge key, ports on the loopback, everything in one folder.

    python tests/slurm/cluster.py up FOLDER && export SLURM_CONF=FOLDER/slurm.conf
    python tests/slurm/cluster.py down FOLDER

Needs root and the Debian packages slurm-wlm and munge. Both nodes answer to the host's name; SLURMD_NODENAME tells them apart.
Partition `urgent` preempts partition `main`, whose jobs go back into the queue.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PORT = 26917  # the controller; the nodes have the next two, srun a hundred above
MARK = "# vitfw test cluster"


def missing() -> str | None:
    """Why no cluster can be started here; None where it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "the test cluster needs root"
    return None


def configuration(folder: Path, host: str) -> str:
    nodes = "\n".join(
        f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={PORT + number} CPUs=4 RealMemory=4096"
        for number in (1, 2)
    )
    return f"""\
ClusterName=vitfw
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={PORT}
SrunPortRange={PORT + 100}-{PORT + 199}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=15
OverTimeLimit=0
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def up(folder: Path) -> None:
    """Starts the cluster in an empty folder that everybody may enter, which munge asks for.

    Raises RuntimeError with the logs where a daemon does not answer.
    """
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(configuration(folder, host))
    (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\nCgroupAutomount=no\n")
    hosts = Path("/etc/hosts")  # launchers look up the first node of a list by its name
    if MARK not in hosts.read_text():
        with hosts.open("a") as file:
            file.write(f"127.0.0.1 node1 node2 {MARK}\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = environment_of(folder)
    sock = folder / "munge.socket"
    _start(
        "munged", f"--key-file={key}", f"--socket={sock}", f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed", "--num-threads=2", env=environment,
    )  # fmt: skip
    _wait(folder, "munged", lambda: _ok(["munge", "-S", str(sock), "-n"], environment))
    _start("slurmctld", env=environment)
    _wait(folder, "slurmctld", lambda: "is UP" in _text(["scontrol", "ping"], environment))
    for node in ("node1", "node2"):
        _start("slurmd", "-N", node, env=environment)
    _wait(
        folder,
        "the nodes",
        lambda: _text(["sinfo", "-h", "-N", "-p", "main", "-o", "%t"], environment).split() == ["idle"] * 2,
    )


def down(folder: Path) -> None:
    """Ends the daemons of this folder, the nodes first, and takes the line out of /etc/hosts."""
    for name in ("slurmd-node1", "slurmd-node2", "slurmctld", "munged"):
        file = folder / f"{name}.pid"
        text = file.read_text().strip() if file.exists() else ""
        if not text.isdigit():
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(text), signal.SIGTERM)
        end = time.monotonic() + 20
        while Path(f"/proc/{text}").exists() and time.monotonic() < end:
            time.sleep(0.1)
    hosts = Path("/etc/hosts")
    lines = hosts.read_text().splitlines(keepends=True)
    hosts.write_text("".join(line for line in lines if MARK not in line))


def environment_of(folder: Path) -> dict[str, str]:
    """What a user's shell has: the configuration, and nothing of a job that this process may itself run in."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return plain | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{plain.get('PATH', '')}:/usr/sbin:/sbin"}


def _start(*command: str, env: dict[str, str]) -> None:
    subprocess.run(
        command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _ok(command: list[str], env: dict[str, str]) -> bool:
    return subprocess.run(command, env=env, capture_output=True).returncode == 0


def _text(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def _wait(folder: Path, what: str, ready: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in folder.glob("*.log"))
            raise RuntimeError(f"{what} did not come up in {seconds:g} s\n{logs}")
        time.sleep(0.1)


if __name__ == "__main__":
    action, place = sys.argv[1], Path(sys.argv[2]).resolve()
    {"up": up, "down": down}[action](place)
