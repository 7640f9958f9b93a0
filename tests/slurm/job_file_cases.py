"""The job files of scripts/slurm before their ranks start, without a Slurm: a `srun` of the test's own says what it is asked.

What a real Slurm does with them is in slurm_cases.py.
"""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
# `srun --mpi=list` writes line by line, and more than a pipe holds; otherwise it says the ranks' command line.
SRUN = """#!/bin/bash
if [[ $1 == --mpi=list ]]; then
  echo "MPI plugin types are..."; printf '\\t%s\\n' none pmi2 KINDS
  for ((line = 0; line < 20000; ++line)); do echo "specific plugin versions available: $line" || exit 1; done
  exit 0
fi
printf 'ranks:'; printf ' <%s>' "$@"; echo
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2",
       "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_END_TIME": "4000000000"}


class JobFiles(unittest.TestCase):
    def setUp(self):
        self.dir = Path(tempfile.mkdtemp(prefix="longhalo_job_"))
        self.addCleanup(shutil.rmtree, self.dir)

    def submit(self, name, *arguments, kinds="pmix", **job):
        """Runs a job file as sbatch does, on no node."""
        (self.dir / "srun").write_text(SRUN.replace("KINDS", kinds))
        (self.dir / "srun").chmod(0o755)
        environment = {"PATH": f"{self.dir}:{os.environ['PATH']}", "TZ": "UTC", **JOB, **job}
        return subprocess.run(["bash", SOURCE / "scripts" / "slurm" / name, *map(str, arguments)], cwd=SOURCE, text=True,
                              env=environment, capture_output=True, timeout=60)

    def refused(self, done, *words):
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertNotIn("ranks:", done.stdout)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_what_slurm_can_connect(self):
        done = self.submit("infer_2gpu.sbatch", "c.yaml", "--set", "tasks=[score]")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("<infer> <--config> <c.yaml> <--set> <output.if_exists=resume> <--set> <tasks=[score]>", done.stdout)
        self.refused(self.submit("train_1m.sbatch", "c.yaml", kinds="pmix_v9"), "has no 'pmix'")

    def test_an_array_over_a_folder(self):
        folder = self.dir / "texts"
        folder.mkdir()
        array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
        for place in (folder, self.dir / "absent"):
            self.refused(self.submit("infer_array.sbatch", "c.yaml", place, "out", **array), f"no file in {place}")
        (folder / "it's one").write_text("x")
        done = self.submit("infer_array.sbatch", "c.yaml", folder, "out", **array)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"<input.documents=['{folder}/it''s one']>", done.stdout)
        array["SLURM_ARRAY_TASK_ID"] = "2"
        self.refused(self.submit("infer_array.sbatch", "c.yaml", folder, "out", **array), "it has 1", "--array=1-1")

    def test_tasks_that_are_spread_unevenly(self):
        self.refused(self.submit("train_1m.sbatch", "c.yaml", SLURM_TASKS_PER_NODE="2,1", SLURM_NTASKS="3", SLURM_JOB_NUM_NODES="2"),
                     "unevenly")


if __name__ == "__main__":
    unittest.main()
