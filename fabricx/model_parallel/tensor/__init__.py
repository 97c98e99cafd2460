"""Tensor parallelism: ranks that hold parts of each weight."""
