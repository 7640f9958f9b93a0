"""Runs one class of end-to-end tests:  cli_test.py MODULE.CLASS  (or MODULE.CLASS.test for a single test).

The tests of a class run a few at a time: nearly all of a refused job is waiting for mpirun. Exit code 0 passed, 1
failed, 77 skipped with a reason (what CTest calls SKIP_RETURN_CODE).
"""

import importlib
import os
import sys
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

SKIPPED = 77
AT_ONCE = 6


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def run_one(test):
    result = unittest.TestResult()
    start = time.monotonic()
    test.run(result)
    return test, result, time.monotonic() - start


def main(name):
    for package in ("numpy", "tokenizers", "h5py", "yaml"):
        try:
            importlib.import_module(package)
        except ImportError:
            skip(f"the Python package {package} is missing; scripts/setup.sh installs it")
    suite = unittest.defaultTestLoader.loadTestsFromName(name)
    tests = [test for test in suite] if isinstance(suite, unittest.TestSuite) else [suite]
    if not tests:
        print(f"there is no test in {name}")
        return 1
    cls = type(tests[0])
    failed, skipped = 0, 0
    try:
        cls.setUpClass()
        with ThreadPoolExecutor(int(os.environ.get("LONGHALO_TESTS_AT_ONCE", AT_ONCE))) as pool:
            for test, result, seconds in pool.map(run_one, tests):
                word = "ok"
                for _, text in result.failures + result.errors:
                    word = "FAILED"
                    print(text)
                if result.skipped:
                    word = f"skipped: {result.skipped[0][1]}"
                    skipped += 1
                failed += word == "FAILED"
                print(f"{test.id()} ({seconds:.1f} s) {word}", flush=True)
    finally:
        cls.tearDownClass()
        cls.doClassCleanups()
        unittest.doModuleCleanups()
    print(f"{len(tests)} tests, {failed} failed, {skipped} skipped")
    return 1 if failed else SKIPPED if skipped == len(tests) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
