"""Example of a project: forecasting waves."""
