"""Functions of the user's, applied to every element."""
