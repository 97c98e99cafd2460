"""Compression of gradients and weights."""
