"""softmax and log_softmax of a user function, the score function."""
