#!/bin/bash
# Random faults over short jobs. `scripts/soak.sh --help` says more.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

usage() {
  cat <<'END'
Usage: scripts/soak.sh [FAULTS [SEED [MORE...]]]

Builds build/release and lets FAULTS (200) random faults strike short training and inference jobs on the CPU: kill -9,
SIGTERM, SIGSTOP with and without SIGCONT, SIGUSR1 and SIGUSR2, to a rank, to all, to mpirun, at random moments. After
each the job has to be gone in time with a documented exit code, and is resumed; in the end it has to give what an
undisturbed job gives, to the last bit where ranks did not change. A table at the end, and exit code 1 if anything was
otherwise: the folders of such jobs are kept. Some 5 seconds a fault on two cores.
SEED (random, and printed) draws the same faults again. MORE: `--job I` for one of the jobs, `--at-once N` jobs (2).
LONGHALO_EXECUTABLE names another build.
END
}

case ${1:-} in
  --help | -h) usage; exit 0 ;;
esac
faults=${1:-200}
[[ $faults =~ ^[1-9][0-9]*$ ]] || { usage >&2; die "'$faults' is no number of faults"; }
[[ -x $PYTHON ]] || die "there is no $PYTHON; scripts/setup.sh makes it"
arguments=(--faults "$faults")
if (($# >= 2)); then
  [[ $2 =~ ^[0-9]+$ ]] || { usage >&2; die "'$2' is no seed"; }
  arguments+=(--seed "$2" "${@:3}")
fi
if [[ -z ${LONGHALO_EXECUTABLE:-} ]]; then
  step "configuring build/release" cmake --preset release --log-level=WARNING
  step "building build/release on $CORES cores" cmake --build build/release --target longhalo --parallel "$CORES"
  LONGHALO_EXECUTABLE=$PWD/build/release/longhalo
fi
[[ -f $LONGHALO_EXECUTABLE && -x $LONGHALO_EXECUTABLE ]] ||
  die "LONGHALO_EXECUTABLE is '$LONGHALO_EXECUTABLE', which is no program"
export LONGHALO_EXECUTABLE LONGHALO_MPIEXEC=${LONGHALO_MPIEXEC:-mpirun} OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" tests/soak/soak.py "${arguments[@]}"
