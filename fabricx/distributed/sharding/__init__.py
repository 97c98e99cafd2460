"""Weights in parts on the ranks: FSDP and what completes it."""
