"""Demonstration models for the command line, on real data that needs no download."""
