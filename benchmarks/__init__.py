"""Benchmarks: how fast each operation is beside its peers and beside a plain copy.

    python -m benchmarks softmax            measure, print a table, write JSON and figures
    python -m benchmarks plot [FILE.json]   draw the figures again: of all results, or of these files
    python -m benchmarks compare OLD NEW    what changed between two result files
    python -m benchmarks selftest           check that the profiler's clock agrees with the others

One file per operation, such as `softmax.py`, defines the cases and their goals. The rest is shared: `_timing.py`
measures, `_inputs.py` makes cold random inputs, `_torch.py` holds the optional PyTorch peer, `_report.py` prints and
stores. `_plot.py` and `_overview.py` choose what figures show, `_words.py` has the words, and `_svg.py` draws.
"""
