"""The worker's side of the exchange with parameter servers."""
