"""Process start-up: start and supervise workers, or join a launch by torchrun or SLURM."""
