"""State of a module and of random generators: recorded, restored, replaced."""
