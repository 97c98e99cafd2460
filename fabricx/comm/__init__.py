"""Ranks and what goes between them; with the strategies the only place that calls torch.distributed."""
