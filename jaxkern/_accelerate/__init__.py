"""How plain JAX programs run on jaxkern: rules for lax.scatter_*, replaced functions, and what decides and explains."""
