"""Engines: each turns one kind of jaxpr into kernels."""
