"""Numbers that decide how hand-written norms map to the GPU, and which norms run on generated kernels or on XLA.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

from jaxkern._engines.rows import layout

# Packs of a row in a lane, by default; beyond, a block has the row [bfloat16 65536 x 1001: rms_norm 144 us, 83 in a block, its gradient 253
# and 179].
WARP_PACKS = 8
FORWARD_THREADS = 128  # of a block whose rows belong to lanes
BACKWARD_THREADS = 256  # the same for gradients; 128 if rows are long
SHORT_THREADS = 128  # blocks of fewer are short
BLOCK_THREADS = 512  # at most, of a block per row
MOST_THREADS = (
    1024  # the same forward, for rows that need it [norm and quantisation, float32 8192 x 32768: 373 us, 753 streaming]
)
BLOCK_HELD = 8  # vectors per thread
SUM_WORDS = 64  # of registers, for a thread's sums over rows
KEPT_WORDS = 80  # kNormKept
# Threads of a gradient on a multiprocessor, wanted and at most [bfloat16 8192 x 5120, layer_norm: 98 us with 4 vectors in 160 threads, 114
# with 2 in 320; float32 133 with 5 in 256, 160 with 4 in 320].
BUSY_THREADS, RESIDENT_THREADS = 480, 1024
# Blocks of a cluster: the fewest that hold a row [float32 2048 x 65536, rms_norm 288 us, 447 streaming; its gradient 537 and 846].
CLUSTERS = (2, 4, 8, 16)
CLUSTER_VECTORS = 512  # per block, at least, where there are few rows
STAGES = 4  # rows of a thread in shared memory
STREAM_THREADS, COLUMN_THREADS, SUMS_COLUMNS, SUMS_THREADS = 512, 128, 32, 512  # of a block

# Which kernels run.
WARP_VECTORS = 128  # of a row that lanes of a warp hold
CLUSTER_WIDTH = 1 << 17  # of 16-bit elements, that 8 blocks hold
STREAM_ROWS = 128  # at least: a row takes a block
# Of 16-bit rows that are no whole vectors, on generated kernels: 77 to 65537 were measured, and 2^20 + 1, where XLA is faster [H100;
# bfloat16 16 x 1048577 forward, rms_norm and layer_norm: 53 and 67 us, XLA 44 and 57].
ODD_WIDTHS = 64, 1 << 17


def generated(p) -> bool:
    """Whether the generated kernel is as fast as the hand-written one, or at most 3 % slower.

    Measured on an H200, in microseconds, generated and hand-written. float32, gradients: rms_norm of 1048576 x 128, 395 and 412,
    of 32768 x 4096, 388 and 406, but of 131072 x 512, 208 and 202; layer_norm of 32768 x 4096, 402 and 420, but of 131072 x 512,
    263 and 199, of 8192 x 5120, 175 and 134. Gradients of odd rows: rms_norm of float32 524288 x 77, 136 and 188, of bfloat16
    32768 x 4097, 319 and 451 (XLA), of 32768 x 4100, 283 and 314; layer_norm of 10872 x 12345, 406 and 912, but of 32768 x 4100, 312 and
    304. Odd rows forward, bfloat16, rms_norm and layer_norm: 524288 x 77, 65 and 74, 65 and 89; 65536 x 1001, 69 and 82, 81 and 120. XLA's
    programs there: 32768 x 4097, 129 and 179, 163 and 247; 10872 x 12345, 135 and 262, 168 and 358; 32768 x 4100, rms_norm 129 and 148, but
    layer_norm 162 and 157. The same on an H100: layer_norm of 32768 x 4098, 181 and 224, its gradient 365 and 391 (by hand); 2048 x 65537,
    rms_norm 211 and 294, layer_norm 250 and 324; with a residual, 65536 x 1001, 179 and 189, 181 and 194 (by hand), 32768 x 4097, 355 and
    571, 357 and 606. Forward: float32 rows of 2048 to 8192, within 1 %; layer_norm of bfloat16 32768 x 4096, 132 and 143, but of
    8192 x 5120, 54 and 48, and with a residual 16384 x 8192, 325 and 267. The gradients of bfloat16 rows in whole
    vectors: rms_norm of 32768 x 4096, 259 and 228, layer_norm 325 and 238.
    """
    size, same = p.itemsizes[0], p.itemsizes[0] == p.itemsizes[1]
    if p.pack < p.vector and _is_short(p):
        return True
    power = p.width & (p.width - 1) == 0
    odd = size == 2 and same and p.pack < p.vector and ODD_WIDTHS[0] <= p.width <= ODD_WIDTHS[1]
    partial = _is_partial(p) and not (p.centre and p.pack == 4)
    if odd and not p.backward and (p.pack == 1 or partial):
        return True
    if partial and p.scale_sum and (odd or not p.centre):
        return True
    if size > 4 or not same or p.width > 8192:
        return False
    if not p.backward:
        if size == 4:
            return p.pack == p.vector and p.width >= 2048
        return p.centre and not p.residual and power and p.width >= 2048
    if not p.scale_sum:
        return False
    if p.pack == 1:
        return True
    if size == 2 or p.pack < p.vector:
        return False
    return 1024 <= p.width <= 4096 and power if p.centre else p.width <= 128 or p.width >= 2048


def _is_short(p) -> bool:
    """Whether threads hold rows alone in generated kernels, at the speed of a copy.

    In microseconds, rms_norm of 2^28 bytes in bfloat16 on an H200: 142 in rows of 3, 145 in rows of 7, where a copy takes 140. By hand,
    4194304 x 7, which are 2^26 bytes at most, took 142 on an H100 and 64 in XLA.
    """
    size, out = p.itemsizes
    held = size * (1 + p.residual) + out * p.backward
    sums = max(size, 4) * p.sums * p.backward
    rows = layout.Problem(p.rows, p.width, held, p.pack, sums, vector=16 // min(size, out))
    return layout.held_alone(rows) is not None


def _is_partial(p) -> bool:
    """Whether rows are of 16-bit elements, no whole vectors, and take a block each."""
    return p.itemsizes[0] == 2 and p.pack < p.vector and p.vectors > WARP_VECTORS


def left_to_xla(p, algorithm: str) -> bool:
    """Whether XLA runs the problem by default, where this algorithm was chosen.

    Measured on an H200, in microseconds, kernel and what XLA makes of the reference. Streaming: float32 2048 x 65536, rms_norm
    415 and 382, its gradient 804 and 723, but layer_norm 470 and 510, its gradient 797 and 864; layer_norm of 16 rows of 2^20,
    469 and 81. The gradient of rms_norm in clusters of 16 blocks, bfloat16 512 x 262144: 452 and 417, but layer_norm's 581 and
    623. Rows of 16-bit elements that are not whole vectors and take a block each, bfloat16 32768 x 4097: rms_norm 337
    and 180, its gradient 734 and 445, but the gradient of layer_norm 471 and 672.
    """
    if algorithm == "streaming":
        return not p.centre or p.rows < STREAM_ROWS
    if algorithm == "cluster":
        return p.backward and not p.centre and p.itemsizes[0] == 2 and p.width > CLUSTER_WIDTH
    return _is_partial(p) and not (p.backward and p.centre)
