"""Process start-up: start and supervise workers, or join a launch by torchrun, MPI, SLURM or SageMaker."""
