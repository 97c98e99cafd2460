"""Predicted time, memory and traffic of a step, and the fastest mesh for a number of devices."""
