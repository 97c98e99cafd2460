"""Real models on real data that need no download: what the command line runs to show itself."""
