"""The softmax over segments of rows: what `jaxkern.segment_softmax` binds."""

from jaxkern._ops.segment_softmax import derivatives, lowering  # noqa: F401  (they register rules)
