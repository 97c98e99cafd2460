"""Values of `self.log`: accumulated, reduced over ranks, and published."""
