"""The options of a Trainer: definition, defaults, and checks."""
