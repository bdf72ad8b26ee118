"""The operations: for each a primitive, its reference in jnp, derivatives, plan of CUDA kernels, and sharding."""
