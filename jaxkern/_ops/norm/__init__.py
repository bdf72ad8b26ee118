"""RMSNorm and LayerNorm of rows."""
