"""cumsum, cumprod, cummax, cummin and cumlogsumexp: reductions of all elements up to each position along an axis."""

from jaxkern._core import package
from jaxkern._definitions.cumulative import cumlogsumexp, cummax, cummin, cumprod, cumsum

__all__ = ["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"]

package.publish(__name__, cumlogsumexp, cummax, cummin, cumprod, cumsum)
