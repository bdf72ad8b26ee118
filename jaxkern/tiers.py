"""The former name of `jaxkern.algorithms`, for programs that use it; `tiers.algorithms` is `algorithms.names`."""

from jaxkern.algorithms import A100, H200, Device, choose, fits, force, force_xla, names, operations, this_device

__all__ = ["A100", "H200", "Device", "algorithms", "choose", "fits", "force", "force_xla", "operations", "this_device"]

algorithms = names
