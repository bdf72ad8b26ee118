"""What all operations share: defining, lowering, partitioning and differentiating primitives."""
