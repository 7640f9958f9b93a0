"""File systems that are full or read-only: small tmpfs mounts in a mount namespace of each test's own."""

import json
import subprocess
import tempfile
import unittest
from pathlib import Path

import h5py

import tiny_model
from harness import Case, Run, records_of, shared_model

# Mounts a file system at $1 with options $2, runs the command, then copies what is in it to $3: a mount of a private
# namespace is gone with the last process in it.
IN_A_MOUNT = """
mount -t tmpfs -o "$2" tmpfs "$1" || exit 90
cp -a "$3/." "$1" 2>/dev/null
[ "$4" = ro ] && mount -o remount,ro "$1"
at=$1 to=$3
shift 4
"$@"
code=$?
rm -rf "$to" && mkdir "$to" && cp -a "$at/." "$to"
exit $code
"""


def may_mount():
    with tempfile.TemporaryDirectory() as folder:
        probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
        return probe.returncode == 0


def make_read_only(run, folder):
    """For a job that was started with `unshare -m`: files that it has open stay writable, as on a real disk in part. While
    one is being written through the new mount, that cannot become read-only: it is tried again, for a second at most."""
    subprocess.run(["nsenter", "-t", str(run.alive()[0]), "-m", "sh", "-ec",
                    f"mount --bind {folder} {folder}; tries=0; until mount -o remount,bind,ro {folder}; do "
                    "tries=$((tries + 1)); test $tries -lt 100; sleep 0.01; done"], check=True)


@unittest.skipUnless(may_mount(), "a tmpfs in a private mount namespace is not permitted here (unshare -m, as root)")
class FullDisk(Case):

    def setUp(self):
        super().setUp()
        self.mount = self.dir / "mount"
        self.kept = self.dir / "kept"  # what stands in the mount before and after
        self.mount.mkdir()
        self.kept.mkdir()
        self.out = self.mount / "out"

    def infer_within(self, size, config, mode="rw"):
        before = ["unshare", "-m", "sh", "-c", IN_A_MOUNT, "sh", self.mount, f"size={size}", self.kept, mode]
        return self.infer(config, before=[str(word) for word in before])

    def old(self):
        (self.kept / "out" / "arrays").mkdir(parents=True)
        (self.kept / "out" / "results.jsonl").write_text('{"document":"old","task":"score","query":null}\n')
        (self.kept / "out" / "arrays" / "old.h5").write_bytes(b"old arrays")

    def assert_old_is_whole(self):
        out = self.kept / "out"
        self.assertEqual((out / "results.jsonl").read_text(), '{"document":"old","task":"score","query":null}\n')
        self.assertEqual((out / "arrays" / "old.h5").read_bytes(), b"old arrays")
        self.assertEqual([p.name for p in out.rglob("*.tmp.*")], [])

    def test_enough_room(self):
        """The same job in a file system that holds it: the others fail for want of room alone."""
        run = self.infer_within("8m", self.config())
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(len(records_of(self.kept / "out")), 3)

    def test_full_during_arrays(self):
        self.old()
        self.document.write_text(tiny_model.document(8000))  # scores and embeddings of some hundred kilobytes
        run = self.infer_within("128k", self.config(output={"if_exists": "replace"}))
        self.assert_refused(run, self.out / "document.txt", "bytes needed", "free")
        self.assert_old_is_whole()

    def test_full_during_results(self):
        """Many prompts: the records do not fit, while nothing else is written."""
        self.old()
        config = self.config(tasks=["generate"], generate={"max_new_tokens": 200}, run={"log": str(self.dir / "log")},
                             input={"prompts": [f"Question {i}?" for i in range(60)]}, output={"if_exists": "replace"})
        run = self.infer_within("64k", config)
        self.assert_refused(run, self.out / "results.jsonl", "bytes", "free")
        whole = (self.kept / "out" / "results.jsonl").read_text().splitlines()
        for line in whole:  # old or new, but whole
            json.loads(line)
        self.assertEqual([p.name for p in (self.kept / "out").rglob("*.tmp.*")], [])
        old = [p for p in (self.kept / "out").rglob("*.jsonl") if '"document":"old"' in p.read_text()]
        self.assertTrue(old, "the old records are still there")

    def test_full_in_the_second_document(self):
        """What was finished before stays, and opens."""
        small, large = self.document, self.write("large.txt", tiny_model.document(8000))
        config = self.config(tasks=["score"], input={"documents": [str(small), str(large)]})
        self.assert_refused(self.infer_within("96k", config), self.out / "large.txt")
        records = records_of(self.kept / "out")
        self.assertEqual([document for document, _, _ in records], [str(small)])
        (record,) = records.values()
        with h5py.File(self.kept / "out" / record["arrays"]) as file:
            self.assertEqual(len(file["scores"]), record["document_tokens"])

    def test_no_room_at_all(self):
        (self.kept / "filler").write_bytes(bytes(40000))
        run = self.infer_within("40k", self.config())
        self.assert_refused(run, self.mount)

    def test_read_only(self):
        self.old()
        run = self.infer_within("8m", self.config(output={"if_exists": "replace"}), mode="ro")
        self.assert_refused(run, self.out, "ead-only")
        self.assert_old_is_whole()

    def test_tokenize(self):
        large = self.write("large.txt", tiny_model.document(40000))
        before = ["unshare", "-m", "sh", "-c", IN_A_MOUNT, "sh", self.mount, "size=64k", self.kept, "rw"]
        run = Run(["tokenize", "--model", shared_model(), "--output", self.mount / "tokens.h5", large], ranks=0,
                  before=[str(word) for word in before]).wait()
        self.assert_refused(run, self.mount / "tokens.h5")
        self.assertEqual(list(Path(self.kept).rglob("*")), [])

    def test_read_only_from_the_middle_on(self):
        """As a disk becomes by an error: what is recorded stays, and the job that is resumed elsewhere does the rest."""
        names = [str(self.write(f"{i}.txt", tiny_model.document(20 + i, seed=i))) for i in range(16)]
        config = self.config(input={"documents": names}, generate={"max_new_tokens": 300})
        run = self.start(config, before=["unshare", "-m"])
        run.wait_for(lambda: (self.out / "results.jsonl").exists(), "records")
        make_read_only(run, self.out)
        run.wait()
        run.seconds = 0  # it was at work
        self.assert_refused(run, self.out, "ead-only file system", "choose another place")
        records = records_of(self.out)
        self.assertLess(len(records), 3 * len(names), "the job was over before")
        again = self.succeed({**config, "output": {**config["output"], "if_exists": "resume"}})
        self.assertEqual(len(again), 3 * len(names))
        for key, record in records.items():
            self.assertEqual(again[key], record)

    def test_files_that_stay_in_place(self):
        """As files that were mounted into a container: they can be written but not replaced, which is said before the
        document is read, where it matters."""
        self.out = self.dir / "out"
        (record,) = self.succeed(self.config(tasks=["score"])).values()
        results = {name: (self.out / name).read_bytes() for name in ("results.jsonl", record["arrays"])}
        for name in results:
            keep = ["unshare", "-m", "sh", "-ec", 'mount --bind "$1" "$1"; shift; exec "$@"', "sh", str(self.out / name)]
            run = self.infer(self.config(tasks=["score", "embed"], output={"if_exists": "resume"}), before=keep)
            self.assert_refused(run, self.out / name, "cannot be replaced", "busy")
            self.assertNotIn("prefill", run.err)
            run = self.infer(self.config(tasks=["score"], output={"if_exists": "resume"}), before=keep)
            self.assertEqual(run.code, 0, run.err)
            for other, contents in results.items():
                self.assertEqual((self.out / other).read_bytes(), contents)

    def test_no_shared_memory(self):
        """/dev/shm is full: ranks of a host talk by other means, and the answers are the same."""
        whole = self.succeed(self.config())
        self.out = self.dir / "without"
        fill = "mount -t tmpfs -o size=64k none /dev/shm; head -c 65536 /dev/zero > /dev/shm/filler"
        run = self.infer(self.config(output={"directory": str(self.out)}),
                         before=["unshare", "-m", "sh", "-ec", f'{fill}; exec "$@"', "sh"])
        self.assertEqual(run.code, 0, run.err)
        records = records_of(self.out)
        self.assertEqual(set(records), set(whole))
        for key, record in whole.items():
            self.assertEqual(records[key].get("answer_ids"), record.get("answer_ids"))

    def test_nobody_says_how_much_memory_there_is(self):
        """A container hides /proc/meminfo: no limit is known, and none is made up."""
        hide = 'mount --bind /dev/null /proc/meminfo; exec "$@"'
        run = self.infer(self.config(), ranks=1, before=["unshare", "-m", "sh", "-ec", hide, "sh"])
        self.assertEqual(run.code, 0, run.err)

    def test_the_memory_that_control_groups_leave(self):
        """As in a Slurm job with --mem, of both versions: what is too much is refused before the kernel ends the job."""
        script = """
            mount -t tmpfs none /sys/fs/cgroup; mkdir -p /sys/fs/cgroup/$1; cd /sys/fs/cgroup/$1
            echo 60000000 > $3; echo 45000000 > $4; echo "$5 5000000" > memory.stat
            echo "$2" > "$6"; mount --bind "$6" /proc/$$/cgroup; cd "$7"; shift 7; exec "$@" """
        for folder, line, *names in (
                ("memory/job_7", "4:cpu,memory:/job_7/step_0", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
                ("job_7", "0::/job_7/step_0", "memory.max", "memory.current", "file")):
            # Without mpirun the process stays the one whose groups were replaced.
            run = self.infer(self.config(), ranks=0, before=["unshare", "-m", "sh", "-ec", script, "sh", folder, line, *names,
                                                             str(self.dir / "groups"), str(self.dir)])
            self.assertEqual(run.code, 2, run.err)
            self.assertRegex(run.err, r"needs \d+ MB .* has 20 MB")
