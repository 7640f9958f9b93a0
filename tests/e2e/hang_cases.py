"""Jobs that hang: a rank that stands still is waited for until the deadline, then the job is gone and has said where."""

import os
import re
import signal
import time

import tiny_model
from harness import Run
from train_resume_cases import ResumingCase

HUNG = 76


class Hangs(ResumingCase):
    """A rank is stopped, which looks like a dead link or a card that has fallen off: it neither answers nor ends."""

    DEADLINE = 4

    def hang(self, run, victim):
        """Stops one of the ranks; the run has to be gone soon after the deadline. What it said, and who."""
        os.kill(run.alive()[victim], signal.SIGSTOP)
        began = time.monotonic()
        run.wait(60)
        self.assertLess(time.monotonic() - began, self.DEADLINE + 20)  # of which the launcher takes some
        self.assertEqual(run.code, HUNG, run.err)
        self.assertEqual(run.alive(), [])
        return re.findall(r"longhalo\[rank (\d)\] error: nothing moves: waited [\d.]+ s for (.*) in operation #(\d+), "
                          r"(.*); (.*)\n", run.err)

    def test_training(self):
        config = self.training(train={"steps": 400, "sequence_tokens": 1000, "validate_every": 400,
                                      "validation_share": 0.3, "checkpoint_every": 5},
                               run={"deadline_seconds": self.DEADLINE})
        (self.dir / "text.txt").write_text(tiny_model.document(3000))
        run = self.start_training(config, ranks=3)
        run.wait_for(lambda: self.last_step() > 12, "steps")
        said = self.hang(run, victim=1)
        self.assertEqual(sorted(rank for rank, *_ in said), ["0", "2"], run.err)
        for _, ranks, number, operation, place in said:
            # The one operation that a step may have before its first layer.
            layer = r"(, layer \d)?" if operation == "an agreement that all went well" else r", layer \d"
            self.assertRegex(place, rf"^step \d+{layer}$")
            self.assertGreater(int(number), 10)
            self.assertRegex(ranks, "rank 1|ranks .*1|the other ranks")
            self.assertTrue(operation)
        # Nothing good is lost, and the setting is nobody's business but the user's.
        saved = max(self.checkpoints())
        self.assertGreaterEqual(saved, 5)
        again = self.train_well(self.resuming({**config, "train": {**config["train"], "steps": saved + 3}}), ranks=3)
        self.assertIn(f"step {saved} of {saved + 3}", again.err)

    def test_reading(self):
        (self.dir / "long.txt").write_text(tiny_model.document(12000))
        config = self.config(input={"documents": [str(self.dir / "long.txt")], "prompts": None}, tasks=["score"],
                             run={"deadline_seconds": self.DEADLINE, "progress": "lines"})
        run = self.start(config, ranks=2)
        run.wait_for(lambda: "prefill 0%" in run.so_far(), "the prefill")
        said = self.hang(run, victim=0)
        self.assertEqual([rank for rank, *_ in said], ["1"], run.err)
        self.assertRegex(said[0][4], "^document 1")

    def test_the_start(self):
        """MPI's own start waits for ever for a rank that does not come; the config is not known to all yet."""
        run = self.start_training(self.training(run={"deadline_seconds": self.DEADLINE}), ranks=3)
        run.wait_for(lambda: len(run.alive()) == 3, "ranks")
        os.kill(run.alive()[1], signal.SIGSTOP)
        began = time.monotonic()
        run.wait(60)
        self.assertLess(time.monotonic() - began, self.DEADLINE + 20)
        self.assertEqual(run.code, HUNG, run.err)
        self.assertRegex(run.err, r"nothing moves: waited .* in operation #\d+, .*; before the first step")
        run.wait_gone()

    def test_a_rank_that_comes_back(self):
        config = self.training(run={"deadline_seconds": 30})
        run = self.start_training(config, ranks=2)
        run.wait_for(lambda: self.last_step() > 2, "steps")
        pid = run.alive()[1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(pid, signal.SIGCONT)
        run.wait(60)
        self.assertEqual(run.code, 0, run.err)
        self.assertNotIn("nothing moves", run.err)

    def test_operations_are_compared(self):
        """The same numbers, at the price of a message for each operation."""
        config = self.training(train={"steps": 6, "validate_every": 6})
        self.train_well(config)
        plain, self.out = self.out, self.dir / "compared"
        self.train_well({**config, "output": {"directory": str(self.out)}, "run": {"check_operations": True}})
        self.assert_same_run(plain, self.out)
