"""Operations of rows and of loops, defined by functions in jnp: the reference, and the source of kernels and derivatives."""
