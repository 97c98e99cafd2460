"""Telemetry: each process of a run writes records to a file; the launching process reads and reports them."""
