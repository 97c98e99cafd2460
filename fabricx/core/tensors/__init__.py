"""Functions of tensors and of nested batches."""
