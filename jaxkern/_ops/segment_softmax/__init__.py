"""The softmax over segments of rows: what `jaxkern.segment_softmax` binds."""

from jaxkern._ops.segment_softmax import derivatives  # noqa: F401  (it registers rules)
