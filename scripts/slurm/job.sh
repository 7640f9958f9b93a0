# shellcheck shell=bash
# What the job files of this folder share; they source it from the repository's root, where sbatch was called.
#   run_ranks COMMAND ARGUMENTS...   `longhalo COMMAND ...` on all tasks of the job, as its last act: ends the script
#                                    with the exit code of the ranks
# Exit code 75 says that the ranks stopped on request with their state saved, because the time limit is near or the
# job was told to make room. Such a job is put back in the queue, where sbatch --no-requeue does not forbid it, and goes
# on from there. Everything else stays as it ended: 0 done, 2 bad config or input, others fatal.
set -euo pipefail

: "${SLURM_JOB_ID:?"this is run by sbatch"}"
: "${SLURM_CPUS_PER_TASK:?"give sbatch --cpus-per-task: it is the number of threads of a rank"}"
. scripts/slurm/site.sh

# A job of an array is named by the array's id and its place: the id alone may be the whole array's.
job=$SLURM_JOB_ID${SLURM_ARRAY_TASK_ID:+" (${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID)"}
job_id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}

say() { printf '%s job %s: %s\n' "$(date +%T)" "$job" "$*" >&2; }

refuse() {
  say "$*"
  exit 2
}

# A rank has a GPU of its own and every node has as many ranks. --ntasks given beside --nodes spreads them unevenly.
if [[ $SLURM_TASKS_PER_NODE == *,* ]] || ((SLURM_NTASKS % SLURM_JOB_NUM_NODES != 0)); then
  refuse "$SLURM_NTASKS tasks are spread unevenly over $SLURM_JOB_NUM_NODES nodes. Give sbatch --nodes and" \
    "--ntasks-per-node, and no --ntasks."
fi

# Ranks that Slurm does not connect would each be a job of their own, or would not start at all.
# (Not through a pipe to grep --quiet, which closes it at once: srun, still writing, would fail and the pipe with it.)
kinds=$(srun --mpi=list 2>&1 || true)
grep --quiet --word-regexp -e "$mpi" <<<"$kinds" ||
  refuse "this Slurm has no '$mpi' to connect ranks. Name one that srun --mpi=list has, and that the Open MPI of" \
    "LongHalo knows, as mpi in scripts/slurm/site.sh; or start with mpirun in this allocation."

# Ranks stop in time by themselves when they know the job's end. Slurm says it since 23.02; before, it can be asked.
if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then
  end=$(squeue --noheader --jobs="$job_id" --format=%e || true)
  if [[ $end == [0-9]* ]]; then
    SLURM_JOB_END_TIME=$(date --date="$end" +%s)
    export SLURM_JOB_END_TIME
  fi
fi

# Puts this job back in the queue, unless something else has been decided about it.
queue_again() {
  local state
  state=$(squeue --noheader --jobs="$job_id" --format=%T || true)
  if [[ $state != RUNNING && $state != SIGNALING ]]; then
    say "stopped with its state saved; it is ${state:-gone}, so it is not queued again"
  elif ((${SLURM_RESTART_COUNT:-0} >= most_restarts)); then
    say "stopped with its state saved, after $most_restarts restarts: submit it anew to go on"
  else
    say "stopped with its state saved; it asks Slurm to be queued again"
    scontrol requeue "$job_id" || { say "submit it anew to go on"; return; }
    sleep 60  # Slurm ends this script before that
  fi
}

run_ranks() {
  local code=0
  export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
  # --mpi=pmix             without it every task can come up as a job of its own, "rank 0 of 1"
  # --kill-on-bad-exit=1   when one rank fails the others end too, instead of waiting for it until the time limit
  # --cpus-per-task        srun does not take it from sbatch by itself (since Slurm 22.05)
  # --cpu-bind=cores       a rank's threads stay on cores of their own. (No OMP_PROC_BIND beside it: threads that write
  #                        checkpoints would inherit the single core of the thread that starts them.)
  # No --gpus-per-task and no --gpu-bind: every rank sees all GPUs of its node and takes the one of its local rank;
  # where it sees only its own, GPUs cannot reach each other directly.
  srun --mpi="$mpi" --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores \
    "$longhalo" "$@" || code=$?
  ((code != 75)) || queue_again
  exit "$code"
}
