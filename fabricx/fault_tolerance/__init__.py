"""Recovery from lost processes: in place, from in-memory checkpoints, with other numbers of ranks."""
