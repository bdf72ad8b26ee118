"""jaxkern: CUDA and CPU kernels for memory-bound operations, as JAX primitives.

    import jaxkern
    y = jaxkern.softmax(x)          # under jit, grad, vmap, shard_map; CPU and GPU

`python -m jaxkern` says what is loaded here, whether it is right, and how fast it is.
"""

__version__ = "0.1.0"

from jaxkern import tiers
from jaxkern._registry import export_checks
from jaxkern.softmax import log_softmax, softmax

__all__ = ["export_checks", "log_softmax", "softmax", "tiers"]
