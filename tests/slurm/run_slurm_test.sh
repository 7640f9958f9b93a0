#!/bin/sh
# run_slurm_test.sh PYTHON SCRIPT ARGUMENTS: runs a test that starts daemons of Slurm, which cannot meet the machine's
# own. Exit code 77: skipped, with a reason.
. "$(dirname "$0")/../support/namespaces.sh"
need_programs "slurm-wlm, munge and iproute2" slurmctld slurmd munged srun sbatch scontrol ip
run_in_namespaces "link show" "$@"
