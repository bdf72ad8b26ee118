"""Cross-entropy of softmax and integer labels: the loss, its gradient, and both in one read."""
