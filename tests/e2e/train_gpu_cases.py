"""longhalo train on GPUs: the same job on the CPU is the judge, and checkpoints go from one to the other."""

import shutil

from device_cases import CUDA, OneGpu
from train_resume_cases import EXACT, ResumingCase

try:
    import torch
    import transformers
except ImportError:
    transformers = None


class TrainGpu(OneGpu, ResumingCase):
    """On one GPU, which two ranks share."""

    def job(self, **train):
        # A step as far as Adam's first ones go moves every weight by the learning rate, whatever the gradient: with
        # a small one, what bf16 rounds away does not lead the runs apart.
        return self.training(model={"path": str(self.own_model(shape=self.SHAPE))},
                             train={"learning_rate": 1e-3, "deterministic": True, **train})

    def on_gpu(self, config, *more, ranks=2):
        return self.train_well(config, *CUDA, "--set", "run.share_gpus=true", *more, ranks=ranks,
                               environment=self.ONE_GPU)

    def into(self, name, config):
        """The same job into another folder, which is where metrics() and checkpoints() look from now on."""
        self.out = self.dir / name
        return {**config, "output": {"directory": str(self.out)}}

    def test_learns_as_the_cpu_does(self):
        config = self.job()
        self.train_well(self.into("cpu", config))
        on_cpu = self.metrics("step") + self.metrics("validation")
        learned = on_cpu[0]["cross_entropy"] - on_cpu[23]["cross_entropy"]
        self.assertGreater(learned, 0.5)
        for ranks in (1, 2):
            run = self.on_gpu(self.into(f"gpu{ranks}", config), ranks=ranks)
            self.assertIn("in bf16", run.err)
            on_gpu = self.metrics("step") + self.metrics("validation")
            self.assertEqual([r["step"] for r in on_gpu], [r["step"] for r in on_cpu])
            for one, other in zip(on_gpu, on_cpu):
                # bf16 moves logits by 2^-8 of themselves, and what is learned from them by as little.
                delta = 2**-7 * (1 + learned * (one["step"] > 1))
                self.assertAlmostEqual(one["cross_entropy"], other["cross_entropy"], delta=delta, msg=one["step"])

    def test_stored_anywhere_the_same_bits(self):
        config = self.job(steps=4, validate_every=4)
        found = []
        for index, (store, every) in enumerate((("device", 1), ("host", 1), ("nvme", 1), ("host", 2), ("nvme", 1.5))):
            activations = {"store": store, "every": every, **({"directory": str(self.dir)} if store == "nvme" else {})}
            run = self.on_gpu(self.into(f"store{index}", {**config, "activations": activations}))
            self.assertIn(f"activations: {store}", run.err)
            found.append([[step[key] for key in EXACT] for step in self.metrics("step")])
        for other in found[1:]:
            self.assertEqual(found[0], other)
        self.assertEqual(list(self.dir.glob("longhalo*")), [], "scratch folders are gone")

    def test_checkpoints_go_on_anywhere(self):
        """From its checkpoint of step 12 the job ends the same: on as many GPU ranks to the last bit."""
        config = self.job(checkpoint_every=12, checkpoint_keep=4)
        whole = self.into("whole", config)
        self.on_gpu(whole)
        for name, go in (("again", lambda c: self.on_gpu(c)), ("alone", lambda c: self.on_gpu(c, ranks=1)),
                         ("cpu", lambda c: self.train_well(c))):
            resumed = self.into(name, config)
            self.copy_run(self.dir / "whole", self.out, step=12)
            run = go(self.resuming(resumed))
            self.assertIn("step 12 of 24", run.err)
            self.assert_same_run(self.out, self.dir / "whole", delta=0 if name == "again" else 2**-7)

    def copy_run(self, folder, to, step):
        """A run as it was after a step: its checkpoints up to there, and its metrics."""
        shutil.copytree(folder, to)
        for path in (to / "checkpoints").glob("step_*"):
            if int(path.name.removeprefix("step_")) > step:
                shutil.rmtree(path)

    def test_saved_model_is_bf16_and_opens(self):
        config = self.job(steps=3)
        self.on_gpu(config)
        text = (self.out / "model" / "config.json").read_text()
        self.assertIn('"torch_dtype": "bfloat16"', text)
        if transformers is None:
            self.skipTest("transformers is not installed")
        model = transformers.AutoModelForCausalLM.from_pretrained(self.out / "model", torch_dtype="auto")
        self.assertEqual(next(model.parameters()).dtype, torch.bfloat16)

    def test_two_exact_bands(self):
        """Kernels that add up two bands' gradients at once would lose some."""
        attention = {"bands": [[1, 0, 64], [1, 128, 256], [8, 256, "inf"]]}
        run = self.train({**self.job(), "attention": attention}, *CUDA, ranks=1, environment=self.ONE_GPU)
        self.assert_refused(run, "takes one band of stride 1", "attention.bands")

    def test_plan_says_what_a_gpu_holds(self):
        job = self.job()
        run = self.train(job, "--plan", *CUDA, ranks=1, environment=self.ONE_GPU)
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("of GPU 0", run.out)
        self.assertIn("host memory: job checkpoint", run.out)
        refused = self.train(job, "--plan", *CUDA, "--set", "activations.store=off", ranks=1,
                             environment=self.ONE_GPU)
        self.assert_refused(refused, "always makes activations again", "device, host or nvme")
