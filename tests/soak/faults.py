"""The faults of a soak: which there are, how a job has to end of each, and who is struck."""

import os
import signal
from dataclasses import dataclass

KILLED_RANK = 128 + signal.SIGKILL  # what mpirun says of it
STOPPED_ON_REQUEST, HUNG = 75, 76
# As README has it: after a SIGTERM to mpirun the code is its own. Open MPI 4.1 gives 1, or the signal where a rank was
# there to get it, or what the ranks ended with when they were quicker.
LAUNCHER_TERMINATED = (1, signal.SIGTERM, STOPPED_ON_REQUEST)


@dataclass(frozen=True)
class Kind:
    name: str
    number: int  # the signal
    target: str  # "rank", "all" (ranks) or "launcher"
    codes: tuple = ()  # how the job may end of it; none: it goes on
    then: int = 0  # a signal that comes after this one, to the same processes,
    pauses: tuple = ()  # so many deadlines later, drawn between these two
    weight: int = 1
    least_ranks: int = 1


KINDS = (
    Kind("kill -9 a rank", signal.SIGKILL, "rank", (KILLED_RANK,), weight=5),
    Kind("kill -9 all ranks", signal.SIGKILL, "all", (KILLED_RANK,), weight=2),
    Kind("kill -9 mpirun", signal.SIGKILL, "launcher", (-signal.SIGKILL,), weight=2),
    Kind("SIGTERM to a rank", signal.SIGTERM, "rank", (STOPPED_ON_REQUEST,), weight=3),
    Kind("SIGTERM to all ranks", signal.SIGTERM, "all", (STOPPED_ON_REQUEST,), weight=2),
    Kind("SIGTERM to mpirun", signal.SIGTERM, "launcher", LAUNCHER_TERMINATED),
    # While it saves its state, or when it has just left.
    Kind("SIGTERM, kill -9 all ranks", signal.SIGTERM, "all", (KILLED_RANK, STOPPED_ON_REQUEST), then=signal.SIGKILL,
         pauses=(0, 0.05), weight=2),
    Kind("SIGUSR2 to a rank", signal.SIGUSR2, "rank", (STOPPED_ON_REQUEST,), weight=2),
    Kind("SIGUSR2 to mpirun", signal.SIGUSR2, "launcher", (STOPPED_ON_REQUEST,)),
    Kind("SIGUSR1 to a rank", signal.SIGUSR1, "rank", weight=2),
    Kind("SIGUSR1 to mpirun", signal.SIGUSR1, "launcher"),
    # One rank is waited for by the others, so it comes back before their deadline is over; all may sleep for longer.
    Kind("SIGSTOP a rank, SIGCONT", signal.SIGSTOP, "rank", then=signal.SIGCONT, pauses=(0.02, 0.5), weight=3),
    Kind("SIGSTOP all ranks, SIGCONT", signal.SIGSTOP, "all", then=signal.SIGCONT, pauses=(0.02, 1.5)),
    # The watchdogs of the others end it.
    Kind("SIGSTOP a rank", signal.SIGSTOP, "rank", (HUNG,), weight=3, least_ranks=2),
)


@dataclass(frozen=True)
class Fault:
    kind: Kind
    after: float  # seconds since all ranks were there, or since the fault before
    rank: float  # which one, as a share of all
    pause: float  # seconds until the second signal


def draw(generator, ranks, deadline):
    """A random fault for a job that always has at least `ranks` ranks."""
    kinds = [kind for kind in KINDS if kind.least_ranks <= ranks]
    (kind,) = generator.choices(kinds, [kind.weight for kind in kinds])
    # A third of them while the job starts.
    after = generator.uniform(0, 0.8) if generator.random() < 1 / 3 else generator.uniform(0.8, 3.5)
    pause = generator.uniform(*kind.pauses) * deadline if kind.pauses else 0
    return Fault(kind, after, generator.random(), pause)


def send(number, pids):
    """Whether any of them was there to get it."""
    struck = False
    for pid in pids:
        try:
            os.kill(pid, number)
            struck = True
        except ProcessLookupError:
            pass
    return struck


def targets(fault, run):
    """Process ids. Those of ranks are taken in the order in which they were started, which is that of the ranks."""
    if fault.kind.target == "launcher":
        return [run.process.pid] if run.process.poll() is None else []
    pids = run.alive()
    if fault.kind.target == "all" or not pids:
        return pids
    return [pids[int(fault.rank * len(pids))]]


def state_of(pid):
    """The process's state, a letter as in ps(1); empty where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def holds_signals(pid):
    """Whether SIGTERM waits or is heard: before that, some milliseconds of loading libraries, it ends any program."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = {name: int(value, 16) for name, _, value in (line.partition(":") for line in file)
                     if name in ("SigBlk", "SigCgt")}
        return bool((masks["SigBlk"] | masks["SigCgt"]) >> (signal.SIGTERM - 1) & 1)
    except OSError:
        return False
