"""Data pipeline: one global order of samples per epoch, divided over ranks and loaded as microbatches."""

from __future__ import annotations

from fabricx.core.tensors.transfer import batch_size_of, to_device
from fabricx.data.combined import CombinedLoader
from fabricx.data.factory import make_feed
from fabricx.data.feed import Feed, Microbatch
from fabricx.data.iterable import ListFeed
from fabricx.data.order import Balance, Cut, Share, epoch_order
from fabricx.data.preprocess import Preprocess
from fabricx.data.samplers import BucketSampler, GroupSampler
from fabricx.data.sources import training_source

__all__ = [
    "Balance", "BucketSampler", "CombinedLoader", "Cut", "Feed", "GroupSampler", "ListFeed", "Microbatch", "Preprocess",
    "Share", "batch_size_of", "epoch_order", "make_feed", "to_device", "training_source",
]  # fmt: skip
