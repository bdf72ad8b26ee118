"""softmax and log_softmax of a function of the user's, its score function."""
