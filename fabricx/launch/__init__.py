"""Process start-up: own workers, or a rank that torchrun or SLURM started."""
