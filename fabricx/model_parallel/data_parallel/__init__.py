"""Data parallelism of pipelines and islands: sums of gradients after the last backward, and local steps."""
