"""Messages, partitions, codecs and channels between workers and servers."""
