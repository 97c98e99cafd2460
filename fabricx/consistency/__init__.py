"""Checks that all ranks of a run build and change the same objects."""
