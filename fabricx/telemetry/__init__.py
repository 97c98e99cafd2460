"""What a run tells of itself: each process writes records, and the one that launched them reads all."""
