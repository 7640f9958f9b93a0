"""Random faults over short jobs: none may give a wrong result, hang, or leave what cannot go on.

soak.py [--faults N] [--seed S] [--job I]: N faults (200), drawn from the seed, strike training and inference jobs of a
tiny model on 1 to 3 CPU ranks. After each fault the job has ended in time, with a documented exit code and without a
rank left, and is resumed; when it is done, its results are those of an undisturbed one: to the last bit where the ranks
were the same all through. Exit code 1 if anything was otherwise; the folders of such jobs are kept. --job I repeats
one of them: who is struck, when and how is drawn anew from the seed, though not at the same instruction.

scripts/soak.sh builds and starts this.
"""

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import tiny_model  # noqa: E402
from faults import HUNG, draw, holds_signals, send, state_of, targets  # noqa: E402
from jobs import UNDISTURBED_SECONDS, References, Work, Wrong  # noqa: E402

VARIANTS = ("train", "train on disk", "infer")
MOST_FAULTS_A_JOB = 8
DEADLINE_SECONDS = 5  # run.deadline_seconds
LAUNCHER_SECONDS = 12  # what mpirun takes to end the others, on a busy machine
# Said by no job that is only disturbed from outside.
NEVER_SAID = ("internal error", "Process received signal", "cannot be used", "damaged bytes")


@dataclass
class Plan:
    """A job and its faults. `ranks`: one number for all its runs, or for each run another."""
    index: int
    variant: str
    ranks: list
    faults: list

    @staticmethod
    def of(seed, index, faults):
        generator = random.Random(f"{seed} {index}")
        variant = VARIANTS[index % len(VARIANTS)]
        moves = generator.random() < 0.25
        ranks = [generator.randint(1, 3) for _ in range(100)] if moves else [generator.choice((1, 2, 2, 3))]
        least = 1 if moves else ranks[0]
        return Plan(index, variant, ranks, [draw(generator, least, DEADLINE_SECONDS) for _ in range(faults)])

    def ranks_of_run(self, number):
        return self.ranks[number % len(self.ranks)]

    def name(self):
        ranks = f"{self.ranks[0]} ranks" if len(self.ranks) == 1 else "changing ranks"
        return f"job {self.index}: {self.variant}, {ranks}"


@dataclass
class Tally:
    """What faults of each kind did, and how long after them the job was gone."""
    ends: dict = field(default_factory=lambda: collections.defaultdict(collections.Counter))
    longest: dict = field(default_factory=lambda: collections.defaultdict(float))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind, end, seconds=0.0):
        with self.lock:
            self.ends[kind][end] += 1
            self.longest[kind] = max(self.longest[kind], seconds)

    def table(self):
        lines = [f"{'fault':<28}{'number':>7}{'longest end':>13}  ended how"]
        for kind in sorted(self.ends):
            ends = ", ".join(f"{end} ({count})" for end, count in self.ends[kind].most_common())
            lines.append(f"{kind:<28}{sum(self.ends[kind].values()):>7}{self.longest[kind]:>11.1f} s  {ends}")
        return "\n".join(lines)


class Disturbed:
    """One job under its faults."""

    def __init__(self, plan, folder, model, references, tally):
        self.plan, self.references, self.tally = plan, references, tally
        self.work = Work(plan.variant, folder, model, DEADLINE_SECONDS)
        self.faults = collections.deque(plan.faults)
        self.history, self.run, self.runs = [], None, 0

    def go(self):
        """Until all faults have struck and the job is done. Raises Wrong."""
        done = False
        while self.faults or not done:
            if done:  # before all of its faults had struck
                self.work.renew()
            done = self.one_run()
            if done:
                self.references.compare(self.work, self.plan.ranks[0] if len(self.plan.ranks) == 1 else None)
                self.work.expect_no_remains(())

    def one_run(self):
        """A run, until a fault ends it or it is done; True: done."""
        ranks = self.plan.ranks_of_run(self.runs)
        self.runs += 1
        self.history.append(f"run {self.runs} on {ranks} ranks")
        run = self.run = self.work.start(ranks)
        self.wait(run, lambda: len(pids := run.alive()) == ranks and all(map(holds_signals, pids)),
                  UNDISTURBED_SECONDS, "all ranks are there")
        pids = run.alive()
        while self.faults:
            fault = self.faults[0]
            if self.wait(run, None, fault.after) or not self.strike(fault, pids):
                break
            self.faults.popleft()
            if fault.kind.codes:
                return self.ended_by(fault, pids)
            self.tally.add(fault.kind.name, "goes on")
        self.wait(run, None, UNDISTURBED_SECONDS, "it is done")
        run.wait(1)
        if run.code != 0:
            raise Wrong(f"nothing has ended the job, but its exit code is {run.code}")
        self.look_after(pids, time.monotonic())
        return True

    @staticmethod
    def wait(run, condition, seconds, what=None):
        """Waits until the run has ended (True) or condition() holds (False); for too long: Wrong, or False without
        `what`."""
        end = time.monotonic() + seconds
        while run.process.poll() is None:
            if condition and condition():
                return False
            if time.monotonic() > end:
                if what:
                    raise Wrong(f"after {seconds} s still not so: {what}")
                return False
            time.sleep(0.01)
        return True

    def strike(self, fault, pids):
        """False: nobody was there."""
        struck = targets(fault, self.run)
        ranks = "" if fault.kind.target == "launcher" else f" {[pids.index(pid) for pid in struck if pid in pids]}"
        self.history.append(f"  {fault.kind.name}{ranks} after {fault.after:.2f} s")
        if not send(fault.kind.number, struck):
            return False
        if fault.kind.then:
            time.sleep(fault.pause)
            self.history.append(f"  and {signal.Signals(fault.kind.then).name} {fault.pause:.2f} s later")
            alive = self.run.alive()
            send(fault.kind.then, [pid for pid in struck if pid in alive])
        return True

    def ended_by(self, fault, pids):
        """The run ends in time and as it should; True: it was done before the fault could do anything."""
        run, began = self.run, time.monotonic()
        bound = DEADLINE_SECONDS + LAUNCHER_SECONDS
        try:
            self.wait(run, None, bound, "the job has ended")
        except Wrong:
            # A rank that is stopped after its last message holds nobody up, and nobody can tell.
            left = run.alive()
            if fault.kind.codes != (HUNG,) or len(left) != 1 or state_of(left[0]) != "T" or len(pids) < 2:
                raise
            send(signal.SIGCONT, left)
            self.wait(run, None, bound, "the job has ended")
            began = time.monotonic()
        run.wait(1)
        seconds = self.look_after(pids, began)
        self.history.append(f"  ended with {run.code} after {seconds:.1f} s")
        self.tally.add(fault.kind.name, run.code, seconds)
        if run.code == 0:
            self.work.expect_finished()
            return True
        if run.code not in fault.kind.codes:
            raise Wrong(f"exit code {run.code} after {fault.kind.name}")
        return False

    def look_after(self, pids, began):
        """What must hold of every end. Seconds until no rank was left."""
        run = self.run
        while run.alive():
            if time.monotonic() > began + DEADLINE_SECONDS + LAUNCHER_SECONDS:
                raise Wrong("ranks are left")
            time.sleep(0.02)
        seconds = time.monotonic() - began
        for words in NEVER_SAID:
            if words in run.err:
                raise Wrong(f"it said '{words}'")
        if "model: " in run.err:  # what earlier runs left in the scratch folder is removed before that is said
            self.work.expect_no_remains(pids)
        return seconds


def soak(arguments, folder):
    """Whether all went well."""
    model = tiny_model.write_model(folder / "model")
    references = References(folder / "undisturbed", model, DEADLINE_SECONDS)
    tally, wrong = Tally(), []
    each = min(MOST_FAULTS_A_JOB, -(-arguments.faults // len(VARIANTS)))
    counts = [min(each, arguments.faults - at) for at in range(0, arguments.faults, each)]
    plans = [Plan.of(arguments.seed, index, count) for index, count in enumerate(counts)]
    if arguments.job is not None:
        plans = [plans[arguments.job]]

    jobs, given_up = [], threading.Event()
    end_with_this_process(jobs, references, given_up)

    def one(plan):
        if given_up.is_set():
            return
        own = folder / f"job_{plan.index}"
        job = Disturbed(plan, own, model, references, tally)
        jobs.append(job)
        began = time.monotonic()
        try:
            job.go()
        except Exception as error:  # also what the harness finds: half lines, a run that does not end
            if given_up.is_set():
                return
            end_all(job.run)
            words = str(error) if isinstance(error, Wrong) else traceback.format_exc()
            (own / "what_was_wrong.txt").write_text(
                "\n".join([plan.name(), *job.history, words, getattr(job.run, "err", None) or job.run.so_far()]))
            wrong.append(own)
            print(f"WRONG: {plan.name()}: {words}\n  {own}/what_was_wrong.txt says more", flush=True)
            return
        shutil.rmtree(own)
        print(f"{plan.name()}: {len(plan.faults)} faults, {job.runs} runs, {time.monotonic() - began:.0f} s: right",
              flush=True)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(one, plans))
    print(tally.table())
    faults = sum(sum(ends.values()) for ends in tally.ends.values())
    print(f"seed {arguments.seed}: {faults} faults over {len(plans)} jobs, {len(wrong)} of them wrong")
    return not wrong


def end_with_this_process(jobs, references, given_up):
    """Whoever ends a soak ends its ranks too."""
    def end(number, _):
        given_up.set()
        for run in [job.run for job in jobs] + references.runs:
            end_all(run)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def end_all(run):
    if run is not None and run.process.poll() is None:
        send(signal.SIGKILL, run.alive(any_program=True))
        run.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--job", type=int, help="only this one of the jobs that faults and seed give")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time (2)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"longhalo_soak_{arguments.seed}_"))
    print(f"seed {arguments.seed}, in {folder}", flush=True)
    good = soak(arguments, folder)
    if good:
        shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
