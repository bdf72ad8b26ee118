"""Cross-entropy of the logits `h @ weight`, which are computed in chunks: the loss and the gradients of both factors."""
