"""Ranks and process groups; with the strategies and launch the only place that calls torch.distributed."""
