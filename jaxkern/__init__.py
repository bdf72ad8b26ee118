"""jaxkern: CUDA kernels for memory-bound operations of JAX programs, as JAX primitives.

    import jaxkern
    y = jaxkern.softmax(x)          # under jit, grad, vmap, shard_map; CPU and GPU

`python -m jaxkern` reports what is loaded on this machine, checks results, and measures speed.
"""

import importlib
import typing

from jaxkern import algorithms, elementwise
from jaxkern import tiers as tiers  # the former name of `algorithms`
from jaxkern._core import package
from jaxkern._core.cpp import Unsupported as Unsupported  # the TypeError of functions that kernels cannot run
from jaxkern._core.package import __version__ as __version__
from jaxkern._core.registry import export_checks
from jaxkern.accelerate import CheckError, accelerate, explain, install, installed, uninstall
from jaxkern.associative_scan import associative_scan
from jaxkern.benchmark import benchmark
from jaxkern.counting import bincount, histogram
from jaxkern.cumulative import cumlogsumexp, cummax, cummin, cumprod, cumsum
from jaxkern.elementwise import *  # noqa: F403  every operation of the table
from jaxkern.elementwise_kernel import elementwise_kernel
from jaxkern.index_add import embedding_lookup, index_add, index_select
from jaxkern.loss import linear_softmax_cross_entropy, softmax_cross_entropy, softmax_cross_entropy_and_grad
from jaxkern.messages import Graph, edge_map, edge_max, edge_mean, edge_min, edge_sum
from jaxkern.norm import batch_norm, group_norm, layer_norm, rms_norm, scale_norm
from jaxkern.quantiles import median, quantile
from jaxkern.quantize import (
    DelayedScale,
    Quantization,
    dequantize,
    fake_quantize,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
)
from jaxkern.recurrences import advantages, discounted_returns, exponential_moving_average
from jaxkern.reduction import logsumexp, reduce_max, reduce_mean, reduce_min, reduce_sum
from jaxkern.row_kernel import row_kernel
from jaxkern.scan import linear_recurrence, scan
from jaxkern.segment import (
    segment_max,
    segment_mean,
    segment_min,
    segment_prod,
    segment_softmax,
    segment_sum,
    sort_indices,
)
from jaxkern.select import Routing, min_p, moe_route, sample, top_k, top_p
from jaxkern.softmax import log_softmax, softmax
from jaxkern.sorting import argsort, searchsorted, sort, sort_pairs, unique
from jaxkern.source import source
from jaxkern.sparse import embedding_bag, graph_attention, moe_combine, moe_dispatch, spmm, spmm_graph
from jaxkern.while_loop import while_loop

if typing.TYPE_CHECKING:  # what is found when it is used; the functions of `elementwise` are made from a table
    from jaxkern import equinox as equinox
    from jaxkern import nnx as nnx
    from jaxkern import optax as optax
    from jaxkern.elementwise import __getattr__ as __getattr__
else:

    def __getattr__(name: str) -> object:
        """The modules for other libraries, which are imported when they are first used."""
        if name in ("equinox", "nnx", "optax"):
            return importlib.import_module(f"jaxkern.{name}")
        raise AttributeError(f"module 'jaxkern' has no attribute {name!r}")


__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "CheckError",
    "DelayedScale",
    "Graph",
    "Quantization",
    "Routing",
    "accelerate",
    "advantages",
    "algorithms",
    "argsort",
    "associative_scan",
    "batch_norm",
    "benchmark",
    "bincount",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dequantize",
    "discounted_returns",
    "edge_map",
    "edge_max",
    "edge_mean",
    "edge_min",
    "edge_sum",
    "elementwise_kernel",
    "embedding_bag",
    "embedding_lookup",
    "explain",
    "exponential_moving_average",
    "export_checks",
    "fake_quantize",
    "graph_attention",
    "group_norm",
    "histogram",
    "index_add",
    "index_select",
    "install",
    "installed",
    "layer_norm",
    "linear_recurrence",
    "linear_softmax_cross_entropy",
    "log_softmax",
    "logsumexp",
    "median",
    "min_p",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "quantile",
    "quantize_blocks",
    "quantize_rows",
    "quantize_tensor",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "rms_norm",
    "scale_norm",
    "row_kernel",
    "sample",
    "scan",
    "searchsorted",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_softmax",
    "segment_sum",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_and_grad",
    "sort",
    "sort_indices",
    "sort_pairs",
    "source",
    "spmm",
    "spmm_graph",
    "top_k",
    "top_p",
    "uninstall",
    "unique",
    "while_loop",
    *elementwise.__all__,
]

package.publish(__name__, Unsupported, export_checks)
