#!/bin/bash
# Set-up, build and every test: the release build with all tests, then the sanitizer build with its own.
# The first failing step ends it with that step's exit code. `scripts/test.sh --help` says more.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

case ${1:-} in
  '') ;;
  --help | -h)
    cat <<'END'
Usage: scripts/test.sh

Sets up (scripts/setup.sh), fetches the model, then builds and runs
  build/release   every test
  build/sanitize  the unit, kernels, storage and mpi tests under the address and undefined-behaviour sanitizers
To run some of the tests after that:  ctest --test-dir build/release --output-on-failure -R NAME   (or -L LABEL)
END
    exit 0 ;;
  *) die "unknown option '$1'; see scripts/test.sh --help" ;;
esac

step "setting up" scripts/setup.sh
step "fetching the model" "$PYTHON" scripts/fetch_model.py
for preset in release sanitize; do
  step "configuring build/$preset" cmake --preset "$preset" --log-level=WARNING -DLONGHALO_TESTS=ON
  step "building build/$preset on $CORES cores" cmake --build "build/$preset" --parallel "$CORES"
done
step "running every test of build/release" ctest --preset release --parallel "$CORES"
say "running the tests of build/sanitize"
exec ctest --preset sanitize --parallel "$CORES"
