"""The run's store: client, server and connections."""
