#!/usr/bin/env bash
# Run a program on the ranks of a PBS job, and again and again until it is done.
#
#   qsub -v PROGRAM='scripts/train_digits.py --checkpoint-dir kept' scripts/pbs.sh
#
# Submit it from the checkout. The program restores its newest checkpoint when it starts, and calls
# exit_if_signalled of a CheckpointManager with save_on_signal=True after each step.

#PBS -N mpi_replica
#PBS -l select=2:ncpus=4:mpiprocs=4:ompthreads=1
#PBS -l walltime=01:00:00
# PBS itself starts the job again after its first host was lost.
#PBS -r y
# The job goes on by the hosts that are left (OpenPBS; others may not know it).
#PBS -W tolerate_node_failures=all
#PBS -j oe
set -uo pipefail
cd "$PBS_O_WORKDIR" || exit

# Here: load the modules of Python and MPI.
export PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra program <<<"${PROGRAM:?is not set: what python is to run}"

# At the walltime PBS sends SIGTERM and soon SIGKILL. So `run` gets SIGUSR1 some time before, and
# hands it on to the ranks: as long before as a step and a checkpoint take.
save_after_seconds=${SAVE_AFTER_SECONDS:-3420}

# It starts a rank for each line of $PBS_NODEFILE, and where one is lost all of them again, on the
# hosts that still answer: not without the first one, on which this script runs.
timeout --foreground --preserve-status --signal=USR1 "$save_after_seconds" \
    python -m mpi_replica run --restarts 3 "${program[@]}"
status=$?

if ((status == 75)); then # all ranks have saved: the same command goes on
    exec qsub -v PROGRAM scripts/pbs.sh # qrerun is for operators alone
fi
exit "$status"
