"""Selecting, searching and counting: one module for each primitive, with its plan."""
