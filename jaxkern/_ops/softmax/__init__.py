"""softmax and log_softmax, plain and with scale, bias, mask, causal limit and dropout fused."""
