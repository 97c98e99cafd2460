"""One run on one rank: its parts, and what a checkpoint saves of them."""
