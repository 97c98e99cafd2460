"""Statistics over ranks: batch normalisation, metrics, moments."""
