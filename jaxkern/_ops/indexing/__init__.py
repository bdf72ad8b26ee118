"""Rows at indices: index_add, the segment operations, index_select, and the order of updates that they share."""

from jaxkern._ops.indexing import derivatives  # noqa: F401  (it registers rules)
