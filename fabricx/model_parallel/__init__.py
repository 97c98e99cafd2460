"""Model parallelism: tensor, pipeline and context parallelism of an unchanged module."""
