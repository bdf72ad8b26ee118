"""What every operation is built from: defining, lowering, partitioning and differentiating a primitive."""
