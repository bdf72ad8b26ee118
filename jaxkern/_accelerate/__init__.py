"""How plain JAX programs run on jaxkern. `jaxkern/accelerate.py` is the public side.

registration.py   puts lowering rules in place of JAX's own
rules.py          scatters; layout.py reads one as an operation on rows
chains.py         gathers and arithmetic before a scatter, as one message kernel, which message.py calls; nodes.py and program.py read the
                  StableHLO
loops.py          scans and while loops
cumulative.py     cumulative operations and `lax.associative_scan`
replace.py        puts functions in place of others: of functions.py and attention.py, by their arguments (arguments.py)
passes.py         the pass over jaxprs: rows.py (inlining.py and regions.py find rows, cuts.py and lifting.py find rows of slices), then
                  selections.py (top_k, sorts, searches, counts; parts.py, searches.py, counts.py find them, calls.py computes them)
gate.py           which cases are taken, by what was measured; selection_gate.py for selections
"""
