"""Classes and functions that implementations of strategies share."""
