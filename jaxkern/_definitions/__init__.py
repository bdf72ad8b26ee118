"""Operations of rows, each defined by a function in jnp: its reference, and the source of its kernels and derivatives."""
