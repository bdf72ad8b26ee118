"""Numbers that decide how the loss of a linear layer maps to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

CHUNK = 1 << 29  # bytes of logits of a chunk by default
WORKSPACE = 1 << 25  # bytes that products may need, at most; a sixteenth of smaller memories
# Rows of a chunk, at least. Computed, not measured: reading and writing the accumulator takes as long as the products of about 216 rows, a
# fifth of a chunk's time. With fewer rows it would take longer than computing logits twice, a third.
ROWS = 1024
COLUMNS = 128  # chunks are multiples of this many columns or rows if they are as large
