"""The training loop and the evaluation loop."""
