"""The command `fabricx` and Hydra."""
