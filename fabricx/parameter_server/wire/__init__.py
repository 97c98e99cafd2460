"""Messages, partitions and channels between workers and servers."""
