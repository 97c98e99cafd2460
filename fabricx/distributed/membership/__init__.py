"""Ranks that form a process group, its generations, and lost peers."""
