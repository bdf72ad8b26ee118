"""exponential_moving_average, discounted_returns and advantages: recurrences by name."""

from jaxkern._core import package
from jaxkern._definitions.recurrences import advantages, discounted_returns, exponential_moving_average

__all__ = ["advantages", "discounted_returns", "exponential_moving_average"]

package.publish(__name__, advantages, discounted_returns, exponential_moving_average)
