"""GroupNorm and BatchNorm: statistics over rows, of groups of channels."""
