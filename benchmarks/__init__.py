"""Benchmarks: how fast each operation is beside its peers and beside a plain copy.

    python -m benchmarks softmax            measure, print a table, write JSON and plots
    python -m benchmarks plot [FILE.json]   draw the plots again
    python -m benchmarks compare OLD NEW    what changed between two result files
    python -m benchmarks selftest           does the profiler's clock agree with the others here

One file an operation (`softmax.py`) says what is measured and what is good enough; the rest is
shared: `_timing.py` measures, `_inputs.py` makes cold random inputs, `_torch.py` holds the optional
PyTorch peer, `_report.py` prints and stores, `_plot.py` draws.
"""
