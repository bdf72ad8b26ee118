"""cumsum, cumprod, cummax, cummin and cumlogsumexp: results for all elements so far along an axis."""

from jaxkern._core import package
from jaxkern._definitions.cumulative import cumlogsumexp, cummax, cummin, cumprod, cumsum

__all__ = ["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"]

package.publish(__name__, cumlogsumexp, cummax, cummin, cumprod, cumsum)
