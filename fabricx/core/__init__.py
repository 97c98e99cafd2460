"""Contracts that users subclass, and what they are made of."""
