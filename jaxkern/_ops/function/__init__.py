"""User functions, applied to every element."""
