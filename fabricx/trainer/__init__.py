"""The Trainer: its options, the run that it starts, and the results."""
