#!/bin/sh
# run_python_test.sh PYTHON SCRIPT ARGUMENTS: runs a Python test, or says why it is skipped (exit code 77).
test -x "$1" || { echo "skipped: there is no Python at $1; scripts/setup.sh makes it"; exit 77; }
exec "$@"
