"""Quantisation to 8 bits, with a scale for each row or block."""
