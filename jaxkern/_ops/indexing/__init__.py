"""Rows at indices: index_add, the segment operations, index_select, and the order of updates that they share."""

from jaxkern._ops.indexing import derivatives, lowering  # noqa: F401  (they register rules)
