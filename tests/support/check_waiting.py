"""Every MPI call that waits for other ranks stands within a Waiting (core/waiting.hpp): the watchdog knows of it, so that
a rank that never comes ends the job, and names the operation. Prints the calls of src that do not.

A call whose Waiting is elsewhere says so, or why it waits for nobody, in a comment "// Waiting: ..." above it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"\bMPI_(Init_thread|Finalize|Comm_dup|Comm_split\w*|Barrier|Bcast|Wait\w*|Probe|Recv|Send|Sendrecv|Reduce\w*|"
                  r"Gather\w*|Scatter\w*|Alltoall\w*|Allgather\w*|Allreduce)\(")
KNOWN = re.compile(r"\bWaiting \w+[({]|// Waiting: ")
# The end of what stands before: of a function, or of one within a class. ("} else {" is not.)
END = re.compile(r"(  )?\}[;)]*$")


def is_within(lines, at):
    """Whether a Waiting is made before line `at`, in the same function."""
    for line in reversed(lines[:at + 1]):
        if KNOWN.search(line):
            return True
        if END.match(line):
            return False
    return False


missing, calls = [], 0
for file in sorted([*(ROOT / "src").rglob("*.cpp"), *(ROOT / "src").rglob("*.hpp")]):
    lines = file.read_text().splitlines()
    for at, line in enumerate(lines):
        if CALL.search(re.sub(r'"[^"]*"|//.*', "", line)):
            calls += 1
            if not is_within(lines, at):
                missing.append(f"{file.relative_to(ROOT)}:{at + 1}: no Waiting: {line.strip()}")
print("\n".join(missing) or f"{calls} calls, all of them watched")
sys.exit(1 if missing or calls < 20 else 0)
