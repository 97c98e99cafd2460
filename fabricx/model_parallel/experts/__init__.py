"""Expert parallelism: experts of a mixture on different ranks."""
