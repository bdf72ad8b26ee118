"""Sums, means, extremes and logsumexp of rows."""
