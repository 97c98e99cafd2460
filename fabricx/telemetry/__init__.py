"""Records of a run: each process writes its own, the launching process reads all."""
