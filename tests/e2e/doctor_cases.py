"""`longhalo doctor` on CPU ranks: a machine that is well passes, and each fault that can be made here is found, named
with its remedy, and decides the exit code. GPUs are those of a stand-in for NVML, adapters those of a folder."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import yaml

import tiny_model
from harness import EXECUTABLE, MPIEXEC, Case, Run, shared_model

FAKE_NVML = os.environ.get("LONGHALO_FAKE_NVML_LIBRARY", "")
KINDS = {"check", "where", "found", "wanted", "verdict", "remedy", "found_by"}


class Doctor(Case):
    def doctor(self, *more, ranks=2, code=0, environment=None, **sections):
        """Runs it, checks what holds of every report, and returns it with the run."""
        self.report_file = self.dir / f"report{len(list(self.dir.iterdir()))}.json"
        settings = {"doctor": {"halo_bytes": 1 << 20, "disk_bytes": 2 << 20, "nvml": "libno-such-nvml.so",
                               "sysfs": str(self.dir / "sys")},
                    "activations": {"directory": str(self.dir)}}
        (self.dir / "sys").mkdir(exist_ok=True)  # no adapters
        for section, keys in sections.items():
            settings[section] = {**settings.get(section, {}), **keys}
        config = self.write("doctor.yaml", yaml.safe_dump(settings))
        run = Run(["doctor", "--config", config, "--json", self.report_file, *more], ranks=ranks,
                  environment=environment).wait(90)
        self.assertEqual(run.code, code, run.out + run.err)
        self.assertEqual(run.alive(), [])
        report = json.loads(self.report_file.read_text())
        for row in report["checks"]:
            self.assertEqual(set(row), KINDS)
            self.assertIn(row["verdict"], ("pass", "warn", "fail", "skipped"))
            self.assertIn(row["found"], run.out)
            if row["verdict"] in ("warn", "fail"):
                self.assertTrue(row["remedy"] and row["remedy"] in run.out, row)
        self.assertEqual(report["doctor"], "fail" if code else "pass")
        self.assertIn(f"\ndoctor: {report['doctor']} (", run.out)
        self.assertEqual([name for name in os.listdir(self.dir) if ".longhalo-" in name], [], "files are left")
        return report, run

    def rows(self, report, check):
        return [row for row in report["checks"] if row["check"] == check]

    def row(self, report, check):
        (row,) = self.rows(report, check)
        return row

    def test_full_standard_output(self):
        path = self.dir / "report.json"
        words = ["sh", "-c", '"$@" >/dev/full', "sh", EXECUTABLE, "doctor", "--set", f"activations.directory={self.dir}",
                 "--set", f"doctor.disk_bytes={2 << 20}", "--json", path]
        run = subprocess.run(words, capture_output=True, text=True, timeout=90)
        self.assertEqual(run.returncode, 2, run.stderr)
        self.assertIn("standard output cannot be written", run.stderr)
        self.assertIn("launch", [row["check"] for row in json.loads(path.read_text())["checks"]])

    def test_halos_larger_than_memory(self):
        report, _ = self.doctor(code=2, doctor={"halo_bytes": 1 << 36})
        row = self.row(report, "halo bandwidth")
        self.assertEqual(row["verdict"], "fail")
        self.assertIn("doctor.halo_bytes 68719476736 asks for 206159 MB of host memory for each of the 2 ranks",
                      row["found"])
        self.assertIn("make doctor.halo_bytes smaller", row["remedy"])
        self.assertEqual(self.row(report, "scratch")["verdict"], "pass")
        alone, _ = self.doctor(ranks=1, doctor={"halo_bytes": 1 << 36})
        self.assertEqual(self.row(alone, "halo bandwidth")["verdict"], "skipped")

    def test_a_machine_that_is_well(self):
        report, run = self.doctor(ranks=3, output={"directory": str(self.dir / "results")})
        verdicts = {row["check"]: row["verdict"] for row in report["checks"]}
        for check in ("launch", "versions", "config", "halo bandwidth", "shared memory", "scratch", "output folder"):
            self.assertIn(verdicts[check], ("pass", "warn"), check)  # warnings: a crowded test machine
        self.assertEqual(verdicts["launch"], "pass")
        self.assertEqual(verdicts["GPU state"], "skipped")
        self.assertEqual(verdicts["InfiniBand"], "skipped")
        self.assertFalse((self.dir / "results").exists(), "the output folder is measured beside, not made")
        halo = report["halo"]
        self.assertEqual((halo["transport"], halo["bytes"]), ("MPI, host memory", 1 << 20))
        for matrix in (halo["gb_per_second"], halo["latency_seconds"]):
            self.assertEqual([len(line) for line in matrix], [3, 3, 3])
            for i in range(3):
                self.assertIsNone(matrix[i][i])
                for j in range(i):
                    self.assertGreater(matrix[i][j], 0)
                    self.assertEqual(matrix[i][j], matrix[j][i])
        (slowest,) = [member["values"] for member in self.row(report, "halo bandwidth")["found_by"]]
        self.assertEqual(slowest["slowest_gb_per_second"],
                         min(rate for line in halo["gb_per_second"] for rate in line if rate))
        a, b = slowest["slowest_ranks"]
        self.assertEqual(halo["gb_per_second"][a][b], slowest["slowest_gb_per_second"])
        self.assertIn(f"ranks {a} and {b} (both on {report['hosts'][0]})", run.out)
        versions = self.row(report, "versions")["found_by"][0]["values"]
        self.assertIn("Open MPI", versions["mpi"])
        self.assertRegex(versions["executable"], r"^[0-9a-f]{12}$")
        self.assertRegex(self.row(report, "scratch")["found"], r"free; writes .* GB/s, reads .* GB/s.*, fsync \d+ ms")

    def test_one_rank_has_no_halos(self):
        report, _ = self.doctor(ranks=1)
        self.assertEqual(self.row(report, "halo bandwidth")["verdict"], "skipped")
        self.assertNotIn("halo", report)

    def test_ranks_that_were_not_connected(self):
        """Another MPI's mpirun, or none: each process is rank 0 of 1."""
        report, run = self.doctor(ranks=0, code=2, environment={"PMI_SIZE": "4"})
        row = self.row(report, "launch")
        self.assertEqual(row["verdict"], "fail")
        self.assertIn("MPI sees 1 rank", row["found"])
        self.assertIn("4, as PMI_SIZE says", row["wanted"])
        self.assertIn("mpirun of the MPI that longhalo is built with", row["remedy"])

    def test_slurm_tasks_that_were_not_connected(self):
        """Every subcommand refuses this before it begins."""
        run = Run(["doctor"], ranks=0, environment={"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}).wait()
        self.assert_refused(run, "Slurm started 4 tasks but MPI sees a single rank", "srun --mpi=pmix")

    def test_a_report_that_cannot_be_written(self):
        """Is said at once, not after the minutes that a doctor of many ranks takes."""
        for place, word in ((self.dir / "none" / "d.json", "No such file"), (self.dir, "Is a directory"),
                            (Path(EXECUTABLE) / "d.json", "Not a directory")):
            run = Run(["doctor", "--json", place], ranks=0).wait()
            self.assert_refused(run, word, str(place))
            self.assertNotIn("longhalo doctor:", run.out, "nothing was looked at")

    def test_a_report_in_place_of_another_file(self):
        """An earlier report makes way for the new one, a model's file does not."""
        earlier = self.write("earlier.json", '{"doctor": "fail"}\n')
        run = Run(["doctor", "--json", earlier, "--set", "doctor.disk_bytes=1048576"], ranks=0).wait()
        self.assertIn("checks", json.loads(earlier.read_text()), run.err)
        (self.dir / "link.json").symlink_to(earlier)
        earlier.write_text("")
        run = Run(["doctor", "--json", self.dir / "link.json", "--set", "doctor.disk_bytes=1048576"], ranks=0).wait()
        self.assertTrue((self.dir / "link.json").is_symlink())
        self.assertIn("checks", json.loads(earlier.read_text()), run.err)
        model = self.write("config.json", json.dumps(tiny_model.CONFIG))
        run = Run(["doctor", "--json", model], ranks=0).wait()
        self.assert_refused(run, "no report of longhalo", model)
        self.assertEqual(json.loads(model.read_text()), tiny_model.CONFIG)

    def test_more_ranks_than_cores(self):
        """On the cores that they may use, which may be fewer than the host has."""
        cores = len(os.sched_getaffinity(0))
        report, _ = self.doctor("--set", "run.threads=1", ranks=1)
        self.assertEqual(self.row(report, "cores")["verdict"], "pass")
        self.assertEqual(self.row(report, "cores")["found"], f"1 rank with 1 thread on {cores} core" + "s" * (cores > 1))
        report, _ = self.doctor("--set", f"run.threads={cores}", ranks=2)
        row = self.row(report, "cores")
        self.assertEqual(row["verdict"], "warn")
        self.assertIn(f"2 ranks with {2 * cores} threads in all on {cores} core", row["found"])
        self.assertIn("run.threads", row["remedy"])

    def test_threads_that_are_no_number(self):
        for value in ("0", "many"):
            report, run = self.doctor(ranks=2, environment={"OMP_NUM_THREADS": value})
            row = self.row(report, "cores")
            self.assertEqual(row["verdict"], "warn")
            self.assertIn(f"OMP_NUM_THREADS='{value}' is no number of threads", row["found"])
            self.assertIn("from 1 on", row["remedy"])
        report, _ = self.doctor("--set", "run.threads=1", ranks=1, environment={"OMP_NUM_THREADS": "0"})
        self.assertEqual(self.row(report, "cores")["verdict"], "pass", "run.threads says how many")

    def test_no_sysfs(self):
        """As in some containers: no adapter to be seen is not the same as none."""
        report, _ = self.doctor(ranks=1, doctor={"sysfs": str(self.dir / "none")})
        row = self.row(report, "InfiniBand")
        self.assertEqual(row["verdict"], "warn")
        self.assertIn(f"there is no folder {self.dir / 'none'}", row["found"])
        self.assertIn("doctor.sysfs", row["remedy"])

    def test_floors(self):
        floors = {"least_halo_gb_per_second": 1e5, "least_scratch_gb_per_second": 1e5, "shm_bytes": 1 << 40}
        report, run = self.doctor(code=2, doctor=floors)
        for check in ("halo bandwidth", "scratch", "shared memory"):
            self.assertEqual(self.row(report, check)["verdict"], "fail", check)
        self.assertIn("doctor.least_halo_gb_per_second", self.row(report, "halo bandwidth")["wanted"])
        self.assertIn(f"the slowest host on average is {report['hosts'][0]}", run.out)

    def test_a_precision_that_the_device_lacks(self):
        report, _ = self.doctor("--set", "run.device=auto", "--set", "run.precision=int8", code=2,
                                environment={"CUDA_VISIBLE_DEVICES": ""})
        row = self.row(report, "device")
        self.assertEqual(row["verdict"], "fail")
        self.assertIn("the CPU computes in fp32 alone", row["found"])

    def test_an_output_folder_that_cannot_be_written_to(self):
        report, _ = self.doctor(code=2, output={"directory": "/proc/longhalo"})
        row = self.row(report, "output folder")
        self.assertEqual(row["verdict"], "fail")
        self.assertIn("/proc/longhalo", row["where"])

    def on_two_hosts(self, on_second, *arguments):
        """Rank 0 here; ranks 1 and 2 on a host "second" with mounts of its own, after the commands `on_second`."""
        here = ["doctor", "--json", self.dir / "two.json", "--set", "doctor.halo_bytes=4096", "--set",
                "doctor.disk_bytes=1048576", "--set", f"activations.directory={self.dir}", *arguments]
        enter = ["unshare", "--uts", "--mount"]
        if subprocess.run([*enter, "true"], capture_output=True).returncode != 0:
            self.skipTest("namespaces of one's own need root (unshare --uts --mount)")
        run = Run(here, ranks=0, before=[MPIEXEC, "--oversubscribe", "--bind-to", "none", "-n", "1", EXECUTABLE,
                                         *map(str, here), ":", "-n", "2", *enter, "sh", "-ec",
                                         f'hostname second; {on_second}; exec "$@"', "sh"]).wait(90)
        return json.loads((self.dir / "two.json").read_text()), run

    def test_hosts_that_differ(self):
        out = self.dir / "results"
        out.mkdir()
        report, run = self.on_two_hosts(f"mount -t tmpfs -o size=64M none {out}; export NCCL_DEBUG=INFO",
                                        "--set", f"output.directory={out}")
        self.assertEqual(run.code, 2, run.out + run.err)
        self.assertEqual([name == "second" for name in report["hosts"]], [False, True, True])
        blind = [row for row in self.rows(report, "output folder") if row["where"] == "job"]
        self.assertEqual([row["verdict"] for row in blind], ["fail"])
        self.assertIn("1 host does not see what rank 0 writes: second", blind[0]["found"])
        unlike = [row for row in self.rows(report, "environment") if row["verdict"] == "warn"]
        self.assertEqual([row["where"] for row in unlike], ["NCCL_DEBUG of 2 ranks"])
        self.assertIn("mpirun -x NAME", unlike[0]["remedy"])
        self.assertEqual({row["where"] for row in self.rows(report, "halo bandwidth")},
                         {"within a host", "between hosts"})

    def test_what_the_job_reads(self):
        """Headers and sizes of what is there; each fault has its row, and the exit code."""
        document = self.write("text.txt", "some words\n")
        prompts = self.write("prompts.txt", "Who?\nWhy?\n")
        job = {"model": {"path": str(shared_model())},
               "input": {"documents": [str(document)], "prompts_file": str(prompts)}}
        report, _ = self.doctor(ranks=1, **job)
        found = {check: self.row(report, check)["found"] for check in ("model", "tokenizer", "prompts", "input")}
        tensors = len(tiny_model.tensors())
        self.assertRegex(found["model"], rf"^{tiny_model.CONFIG['num_hidden_layers']} layers, {tensors} tensors of \d+ bytes$")
        self.assertRegex(found["tokenizer"], r"^\d+ tokens$")
        self.assertEqual((found["prompts"], found["input"]), ("2 prompts", "1 document of 11 bytes"))
        for faults in ({"model": {"path": str(self.dir / "no_model")}},
                       {"input": {"documents": [str(document), str(self.dir / "no_text")]}},
                       {"input": {"documents": [str(document), str(self.write("empty", ""))]}},
                       {"input": {"prompts_file": str(self.dir)}},
                       {"input": {"documents": [], "tokens": str(document)}}):
            report, run = self.doctor(ranks=1, code=2, **{**job, **{k: {**job[k], **v} for k, v in faults.items()}})
            failed = [row for row in report["checks"] if row["verdict"] == "fail"]
            wrong = [list(keys.values())[-1] for keys in faults.values()][0]
            wrong = wrong[-1] if isinstance(wrong, list) else wrong
            for row in failed:
                self.assertIn(wrong, row["found"] + row["where"])
            self.assertIn(len(failed), (1, 2))  # a folder without a model has no tokenizer either

    def test_prompts_that_no_task_reads(self):
        """They are no fault of a job that only scores."""
        job = {"model": {"path": str(shared_model())}, "input": {"prompts_file": str(self.dir / "none")}}
        report, _ = self.doctor("--set", "tasks=[score]", ranks=1, **job)
        self.assertEqual([row for row in report["checks"] if row["check"] == "prompts"], [])
        report, _ = self.doctor("--set", "tasks=[generate]", ranks=1, code=2, **job)
        self.assertIn("No such file", self.row(report, "prompts")["found"])

    def test_tokens_of_another_tokenizer(self):
        model, tokens = self.dir / "model", self.dir / "tokens.h5"
        shutil.copytree(shared_model(), model)
        made = Run(["tokenize", "--model", model, "--output", tokens, self.write("text.txt", "some words\n")], ranks=0).wait()
        self.assertEqual(made.code, 0, made.err)
        job = {"model": {"path": str(model)}, "input": {"tokens": str(tokens)}}
        report, _ = self.doctor(ranks=1, **job)
        self.assertEqual([self.row(report, check)["verdict"] for check in ("tokenizer", "input")], ["pass"] * 2)
        with open(model / "tokenizer.json", "a") as file:
            file.write("\n")
        report, _ = self.doctor(ranks=1, code=2, **job)
        self.assertIn("made with another tokenizer", self.row(report, "input")["found"])
        (model / "tokenizer.json").write_text("{")
        report, _ = self.doctor(ranks=1, code=2, **job)
        self.assertEqual(self.row(report, "tokenizer")["verdict"], "fail")

    def test_a_config_without_a_job(self):
        report, _ = self.doctor(ranks=1)
        self.assertEqual([self.row(report, check)["verdict"] for check in ("model", "input")], ["skipped"] * 2)

    def test_what_one_host_cannot_read(self):
        """The model is read on all hosts; documents on the first alone, and a token file by a training."""
        data = self.dir / "data"
        data.mkdir()
        shutil.copytree(shared_model(), data / "model")
        document = self.write("data/text.txt", "some words\n")
        tokens = data / "tokens.h5"
        made = Run(["tokenize", "--model", data / "model", "--output", tokens, document], ranks=0).wait()
        self.assertEqual(made.code, 0, made.err)
        hide = f"mount -t tmpfs none {data}"
        for settings, verdicts in ((["input.documents=[%s]" % document], {"model": "fail"}),
                                   ([f"input.tokens={tokens}"], {"model": "fail", "input": "fail"}),
                                   ([f"input.tokens={tokens}", "tasks=[score]"], {"model": "fail", "input": "warn"})):
            more = [word for one in [f"model.path={data / 'model'}", *settings] for word in ("--set", one)]
            report, run = self.on_two_hosts(hide, *more)
            self.assertEqual(run.code, 2, run.out + run.err)
            rows = [row for row in report["checks"] if row["check"] in ("model", "tokenizer", "input")]
            self.assertEqual({row["check"]: row["verdict"] for row in rows if "second" in row["where"]}, verdicts)
            self.assertEqual({row["verdict"] for row in rows if "second" not in row["where"]}, {"pass"})

    def test_little_shared_memory(self):
        """Seen on the host that has it so; what else lies there counts."""
        report, run = self.on_two_hosts("mount -t tmpfs -o size=64M none /dev/shm; head -c 60M /dev/zero > /dev/shm/left")
        self.assertEqual(run.code, 2, run.out + run.err)
        (row,) = [row for row in self.rows(report, "shared memory") if row["verdict"] == "fail"]
        self.assertIn("second", row["where"])
        self.assertIn("free of 64 MiB", row["found"])
        self.assertIn("--shm-size", row["remedy"])

    def port(self, device, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", **counters):
        folder = self.dir / "sys" / "class" / "infiniband" / device / "ports" / "1"
        (folder / "counters").mkdir(parents=True)
        for name, value in {"state": state, "rate": rate, "link_layer": "InfiniBand"}.items():
            (folder / name).write_text(f"{value}\n")
        for name, value in {"symbol_error": 0, "link_downed": 0, "port_xmit_data": 12345, **counters}.items():
            (folder / "counters" / name).write_text(f"{value}\n")

    def test_adapters(self):
        self.port("mlx5_0")
        self.port("mlx5_1", symbol_error=17)
        self.port("mlx5_2", state="1: DOWN")
        report, _ = self.doctor()
        errors = {row["found_by"][0]["place"]: row for row in self.rows(report, "link errors")}
        self.assertEqual(errors["mlx5_0 port 1"]["verdict"], "pass")
        self.assertEqual(errors["mlx5_1 port 1"]["verdict"], "warn")
        self.assertIn("symbol_error 17", errors["mlx5_1 port 1"]["found"])
        self.assertEqual(len(errors), 2)
        down = [row for row in self.rows(report, "InfiniBand") if row["verdict"] == "warn"]
        self.assertEqual([row["found_by"][0]["place"] for row in down], ["mlx5_2 port 1"])
        self.assertIn("NCCL_IB_HCA", down[0]["remedy"])

    def gpus(self, faults, **kwargs):
        if not FAKE_NVML:
            self.skipTest("LONGHALO_FAKE_NVML_LIBRARY names no stand-in")
        return self.doctor(doctor={"nvml": FAKE_NVML}, environment={"LONGHALO_FAKE_NVML": faults}, **kwargs)

    def test_gpus_that_are_well(self):
        report, _ = self.gpus("gpus=4")
        host = report["hosts"][0]
        self.assertEqual(self.row(report, "GPU ECC")["where"], f"host {host}: GPU 0, GPU 1, GPU 2, GPU 3")
        self.assertEqual(self.row(report, "GPU topology")["found"], "by NVLink: all pairs")
        self.assertEqual({row["verdict"] for row in report["checks"] if row["check"].startswith("GPU ")
                          and row["check"] != "GPUDirect RDMA"}, {"pass"})

    def test_a_gpu_that_is_slowed_down(self):
        report, run = self.gpus("throttle=0x40,ecc=2", code=2)
        (clocks,) = [row for row in self.rows(report, "GPU clocks") if row["verdict"] == "fail"]
        self.assertIn("slowed down by heat", clocks["found"])
        self.assertEqual(clocks["where"], f"host {report['hosts'][0]}: GPU 1")
        self.assertIn("2 uncorrected errors", run.out)

    def test_a_check_that_does_not_end(self):
        """A rank that is stopped in the middle: the others give up in time, and say where."""
        run = Run(["doctor", "--set", f"activations.directory={self.dir}", "--set", "doctor.patience_seconds=10",
                   "--set", "doctor.halo_bytes=8", "--set", "doctor.sysfs=/nonexistent",
                   "--set", f"doctor.json={self.dir / 'none.json'}"], ranks=2,
                  environment={"LONGHALO_DOCTOR__NVML": self.hanging_library()})
        run.wait(60)
        self.assertEqual(run.code, 2, run.err)
        self.assertIn("was not over after 10 s", run.err)
        self.assertRegex(run.err, "the check '(host|transport)'")  # the rank that hangs, or the one that waits for it
        self.assertIn("doctor.patience_seconds", run.err)
        run.wait_gone()
        self.assertFalse((self.dir / "none.json").exists())

    def hanging_library(self):
        """A library's name that takes for ever to open: a pipe that nobody writes to."""
        path = self.dir / "pipe.so"
        os.mkfifo(path)
        return str(path)
