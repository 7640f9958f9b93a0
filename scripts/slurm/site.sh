# shellcheck shell=bash disable=SC2034
# What a cluster wants to be told, for all job files of this folder. All of it is to edit; the resources of a job stand
# at the top of its file.

# module load openmpi hdf5 openblas

# The program, from the folder that sbatch was called from.
longhalo=${LONGHALO_EXECUTABLE:-build/release/longhalo}

# How Slurm tells the ranks of each other. The Open MPI that LongHalo is built with needs PMIx: `srun --mpi=list` has to
# name it (as pmix, pmix_v4 and so on).
mpi=${LONGHALO_SLURM_MPI:-pmix}

# How Slurm's PMIx waits for all ranks at their start. Its default takes a tree for that, which at times lets some begin
# before the others are ready and so ends one of these with a segmentation fault in MPI_Init (seen with Slurm 22.05 and
# Open MPI 4.1 on busy nodes). A ring does not.
export SLURM_PMIX_FENCE=ring

# Times that a job puts itself back in the queue, at most.
most_restarts=100

# Node-local scratch for activations.store: nvme, where $SLURM_TMPDIR or else $TMPDIR is not it.
# export LONGHALO_ACTIVATIONS__DIRECTORY=/local/$USER

# The InfiniBand adapters that carry GPU traffic. The second = asks for exact names; without the list NCCL may choose
# an adapter that serves storage, and nothing but the speed tells.
# export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3

# An adapter sends again what was not acknowledged after 4.1 microseconds * 2^22 = 17 s, seven times: a link that comes
# back within two minutes does not end the job. (A rank that died is noticed by Slurm, not by this.)
export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7
