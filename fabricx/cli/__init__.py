"""The command `fabricx`, and its integration with Hydra."""
