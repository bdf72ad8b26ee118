"""Hand-written kernels of softmax and log_softmax."""
