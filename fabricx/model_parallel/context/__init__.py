"""Context parallelism: ranks that compute parts of each sequence."""
