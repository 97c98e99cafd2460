"""What each rank is doing, for reports of hangs."""
