"""Strategies with parameter servers: workers, servers, and the messages between them."""
