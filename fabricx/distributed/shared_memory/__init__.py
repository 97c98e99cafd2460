"""Memory that the ranks of a machine share."""
