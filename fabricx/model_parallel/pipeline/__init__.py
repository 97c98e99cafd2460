"""Pipeline parallelism: stages of consecutive blocks of a module."""
