"""Messages between processes, with proof of the run's key."""
