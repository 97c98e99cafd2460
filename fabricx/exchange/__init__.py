"""Workers and servers that train one model: what travels between them, and what a server does with it."""
