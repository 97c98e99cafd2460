"""How processes start: workers of our own, or a place among those that torchrun or SLURM started."""
