"""A project of a user's own: forecasting waves."""
