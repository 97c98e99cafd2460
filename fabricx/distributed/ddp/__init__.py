"""Data parallelism with whole weights: torch's DDP and what completes it."""
