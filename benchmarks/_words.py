"""The cells of result files in words: programs, operations, directions, and what the shape of a case means."""

from __future__ import annotations

import math
import re
from typing import Any

FAMILIES = {
    "softmax": "softmax",
    "fused_softmax": "attention weights",
    "score": "score functions",
    "elementwise": "elementwise",
    "elementwise_kernel": "own elementwise",
    "row_kernel": "own rows",
    "scan": "scan",
    "while_loop": "while_loop",
    "associative_scan": "associative_scan",
    "quantize": "quantisation",
    "reduction": "reductions",
    "norm": "norms",
    "cross_entropy": "cross-entropy",
    "linear_cross_entropy": "linear cross-entropy",
    "index_add": "index_add, segments",
    "scatter": "scatters",
    "select": "selection, sorts, counts",
    "selected": "programs that select",
    "segment_softmax": "segment_softmax",
    "messages": "messages",
    "sparse": "bags, experts, graphs",
    "programs": "whole programs",
    "sharding": "several devices",
}
DIRECTIONS = {
    "forward": "forward",
    "backward": "gradient",
    "both": "value and gradient",
    "step": "loss with gradient",
    "tangent": "forward-mode derivative",
    "2.8GB": "value and gradient in 2.8 GB",
    "0.7GB": "value and gradient in 0.7 GB",
    "default": "value and gradient, default memory",
}
# Names of functions that are the benchmarks' own. Other operations are functions of the API, by their names.
OPERATIONS = {
    "advantages": "advantages of PPO",
    "all": "all of them",
    "average": "moving average",
    "bias": "bias",
    "block_end": "layer scale, residual, norm",
    "blocks_e4m3": "blocks to float8 e4m3",
    "blocks_e5m2": "blocks to float8 e5m2",
    "cap": "soft cap",
    "cap_bias": "soft cap and relative bias",
    "causal": "causal limit",
    "chain": "scatter-add of gathered rows and weights",
    "cheap": "four cheap operations",
    "documents": "within documents",
    "dropout": "dropout",
    "route": "moe_route",
    "edge_dot": "edge_dot",
    "entropy": "entropy of a softmax",
    "filtered": "hidden Markov, normalised",
    "five": "tanh and sigmoid, five operations",
    "gated": "gated unit (SRU)",
    "gated_norm": "gated norm",
    "heads": "8 heads",
    "heston": "Heston's option prices",
    "hidden": "hidden Markov, logs",
    "huber": "Huber loss",
    "integrator": "adaptive integrator",
    "mask": "mask",
    "neurons": "spiking neurons",
    "newton": "Newton's method (Kepler)",
    "normblocks_e4m3": "rms_norm, blocks to float8 e4m3",
    "normblocks_int8": "rms_norm, blocks to int8",
    "normrows_e4m3": "rms_norm, rows to float8 e4m3",
    "oscillators": "state space layer",
    "pairs": "keys with values",
    "part": "a part of a sort",
    "program": "programs",
    "recurrence": "linear recurrence",
    "rows_e4m3": "rows to float8 e4m3",
    "rows_int8": "rows to int8",
    "sampler": "rejection sampler",
    "scale": "scale",
    "sinkhorn": "Sinkhorn's algorithm",
    "smoothed_loss": "loss with label smoothing",
    "soft_cap": "softmax with a soft cap",
    "tensor_e4m3": "tensor to float8 e4m3",
    "threshold": "softmax cut off below a tenth",
    "transposed_e4m3": "blocks and their transpose",
    "walk": "random walks with keys",
    "window": "sliding window",
    "updates": "scatter-add",
}
PROGRAMS = {
    "sinkhorn": "Sinkhorn transport",
    "vocabulary head": "vocabulary head, 50 257 words",
    "transformer": "transformer of GPT-2's size",
    "mesh simulator": "mesh simulator",
    "potential with forces": "molecular forces",
    "embedding": "embedding of 128 256 words, dense layers",
    "click model": "click model, 8 bags of 20 ids",
    "graph convolution": "graph convolution",
    "graph attention": "graph attention",
    "interaction network": "interaction network",
    "griffin layer": "Griffin layer",
    "state space layers": "state space layers",
    "advantages": "advantages of PPO",
    "random walks": "random walks",
    "oscillators": "Van der Pol's oscillators",
    "adaptive integrator": "adaptive integrator",
    "sampling of tokens": "sampling of tokens",
    "molecular dynamics": "molecular dynamics",
    "hierarchical model": "hierarchical model",
    "llama": "Llama-like transformer",
    "llama with experts": "Llama-like transformer with 8 experts",
    "llama with cudnn": "Llama-like transformer, cuDNN's attention",
    "t5 encoder": "T5 encoder",
    "vision transformer": "vision transformer",
    "capped transformer": "transformer with soft caps",
}
DETAILS = {
    "zipf": "skewed degrees",
    "uniform": "even degrees",
    "by hand": "norms and losses by hand",
    "ott-jax": "ott-jax",
    "jax-md": "jax-md",
    "numpyro": "NumPyro",
}
WEAK = ("rows", "step")  # groups of cases of several devices that scale weakly; the others scale strongly
SPLITS = {
    "softmax rows": "softmax, rows split",
    "cross_entropy rows": "loss and gradient, rows split",
    "index_add rows": "index_add, rows split",
    "row function rows": "row function, rows split",
    "recurrence lanes": "linear recurrence, lanes split",
    "top_k rows": "top_k, rows split",
    "softmax rows of one array": "softmax, rows split",
    "index_add rows of one array": "index_add, rows split",
    "softmax classes": "softmax, classes split",
    "loss classes": "loss, classes split",
    "cross_entropy classes": "loss and gradient, classes split",
    "row function columns": "row function, columns split",
    "recurrence steps": "linear recurrence, steps split",
    "top_k columns": "top_k, columns split",
    "training step": "transformer step, batch split",
}
KINDS = {
    "sorted": "sorted",
    "unsorted": "not sorted",
    "uniform": "even",
    "zipf": "Zipf",
    "zipf 1.1": "Zipf 1.1",
    "zipf 1.5": "Zipf 1.5",
    "half": "half of all on one",
    "half unsorted": "half of all on one, not sorted",
    "same": "all on one",
}
GRAPHS = {169343: "ogbn-arxiv's", 2449029: "ogbn-products'"}  # numbers of nodes


def count(n: int) -> str:
    """1 024, 1.17 million; spaces do not break."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if n >= size:
            return f"{n / size:.3g}\u00a0{name}"
    return f"{n:,}".replace(",", "\u00a0")


def rows_of(n: int, width: int) -> str:
    return f"{count(n)} rows of {count(width)}" if n > 1 else f"one row of {count(width)}"


def by(shape: Any) -> str:
    return "\u00a0×\u00a0".join(count(n) for n in shape)


def device(environment: dict[str, Any]) -> str:
    """H200 for "NVIDIA H200", H100 for "NVIDIA H100 80GB HBM3"."""
    name = environment["device"]
    found = re.search(r"\b[A-Z]+\d+\w*", name.removeprefix("NVIDIA "))
    return found[0] if found else name


def operation(row: dict[str, Any]) -> str:
    return OPERATIONS.get(row["op"], row["op"])


def direction(row: dict[str, Any]) -> str:
    return DIRECTIONS.get(row["direction"], row["direction"])


def program(name: str) -> str:
    """A program of benchmarks/programs.py: "graph convolution, jraph, zipf"."""
    first, *rest = name.split(", ")
    return ", ".join([PROGRAMS.get(first, first), *(DETAILS.get(word, word) for word in rest)])


def case(of: str, row: dict[str, Any]) -> str:
    """The case of a cell of the benchmark `of`: what its shape means."""
    return _CASES.get(of, _array)(row)


def _array(row: dict[str, Any]) -> str:
    """Rows, with what follows the shape in the name of the case."""
    shape, rest = row["shape"], row["case"].split(" ")[1:]
    words, axis = [], None
    if "axis" in rest:
        axis = int(rest[rest.index("axis") + 1])
        rest = rest[: rest.index("axis")]
    if rest:
        words.append({"where": "with a mask", "scale": "with a factor per row", "scalar": "with a scalar"}.get(
            " ".join(rest), "with a " + " ".join(rest)
        ))  # fmt: skip
    if len(shape) == 1:
        words.insert(0, f"{count(shape[0])} numbers")
    elif len(shape) == 2 and axis == 0:
        words.insert(0, f"{count(shape[1])} columns of {count(shape[0])}")
    elif len(shape) == 2:
        words.insert(0, rows_of(*shape))
    elif axis is not None and axis != len(shape) - 1 or len(shape) == 3:
        words.insert(0, f"{by(shape)}, along the {('first', 'second', 'third', 'fourth')[axis or 0]} axis")
    else:
        words.insert(0, f"{count(math.prod(shape[:-1]))} rows of {count(shape[-1])}")
    return ", ".join(words)


def _norm(row: dict[str, Any]) -> str:
    shape = row["shape"]
    if row["group"] != "images":
        return _array(row)
    last = row["axis"] != 1
    n, channels, size = shape[0], shape[-1] if last else shape[1], shape[1:-1] if last else shape[2:]
    return f"{n} images of {by(size)}, {channels} channels" + ("" if last else " first")


def _attention(row: dict[str, Any]) -> str:
    batch, heads, queries, keys = row["shape"]
    return f"{by((queries, keys))} weights, {heads} heads, batch of {batch}"


def _loss(row: dict[str, Any]) -> str:
    tokens, classes = row["shape"]
    return f"{count(tokens)} token{'s' * (tokens > 1)}, {count(classes)} classes"


def _head(row: dict[str, Any]) -> str:
    tokens, width, words = row["shape"]
    model = {"llama": "Llama 3's head", "gpt2": "GPT-2's head"}.get(row["group"], "a head")
    return f"{model}: {count(tokens)} tokens, {count(width)} features, {count(words)} words"


def _loop(row: dict[str, Any]) -> str:
    steps, *lanes = row["shape"]
    states = lanes.pop() if row["group"] == "rows" else 0
    return f"{count(steps)} steps, {by(lanes)} lanes" + (f" of {states} states" if states else "")


def _lanes(row: dict[str, Any]) -> str:
    return f"{count(row['shape'][0])} lanes"


def _cumulative(row: dict[str, Any]) -> str:
    if len(row["shape"]) == 1:
        return f"one row of {count(row['shape'][0])}"
    steps, lanes = row["shape"] if row["axis"] == 0 else row["shape"][::-1]
    return f"{count(lanes)} {'columns' if row['axis'] == 0 else 'rows'} of {count(steps)}"


def graph(nodes: int, edges: int) -> str:
    name = f"graph of {GRAPHS[nodes]} size" if nodes in GRAPHS else f"graph of {count(nodes)} nodes"
    return f"{name}, {count(edges)} edges"


def _edges(row: dict[str, Any]) -> str:
    edges, width = row["shape"]
    nodes = int(row["case"].split(" into ")[1].split()[0])
    order = ", not sorted" if row["case"].endswith("unsorted") else ""
    kind = {"uniform": "even degrees", "zipf": "skewed degrees", "half": "half into one node"}[row["kind"]]
    return f"{graph(nodes, edges)}, {width} feature{'s' * (width > 1)}, {kind}{order}"


def _segments(row: dict[str, Any]) -> str:
    edges, width = row["shape"]
    return (
        f"{count(edges)} rows of {width}, {count(int(row['case'].split(' in ')[1].split()[0]))} segments, "
        + (KINDS[row["kind"]])
    )


def _indices(row: dict[str, Any]) -> str:
    (rows, *inner), n, kind = row["shape"], row["count"], KINDS[row["kind"]]
    what = "numbers" if not inner else f"rows of {by(inner)}"
    if row["group"] in ("sorted", "skew", "graph") and rows in GRAPHS:
        return f"{graph(rows, n)}, {inner[0]} feature{'s' * (inner[0] > 1)}, {kind}"
    if row["group"] == "embedding":
        return f"embedding, {count(n)} tokens, {count(rows)} words of {count(inner[0])}"
    if row["group"] == "histogram":
        return f"histogram of {count(n)} numbers in {count(rows)} bins"
    batch = re.match(r"(\d+) of (shared )?", row["case"])
    where = "into one" if rows == 1 else f"into {count(rows)}"
    words = f"{count(n)} {what} {where}"
    if batch:
        words += f", {count(int(batch[1]))} times" + (", the same indices" if batch[2] else "")
    return words + ("" if row["kind"] == "uniform" else f", {kind}")


def _sparse(row: dict[str, Any]) -> str:
    kind, n = row["group"], row["count"]
    if kind == "bags":
        size = row["case"].split(" of ")[1]
        return f"{count(n)} bags of {size} ids, {count(row['shape'][0])} words of {row['shape'][1]}"
    if kind == "experts":
        return f"{count(n)} tokens of {count(row['shape'][1])}, 2 experts each"
    return f"{graph(row['shape'][0], n)}, {row['shape'][1]} features"


def _selected(row: dict[str, Any]) -> str:
    """Of what: the k largest, or an operation of rows or numbers."""
    kind, numbers = row["op"], row["case"].split()[2:]
    number = int(numbers[0]) if numbers and numbers[0].isdigit() else 0
    rows, width = (1, *row["shape"])[-2:]
    many = f"{count(rows)} rows of {count(width)}" if rows > 1 else f"{count(width)} numbers"
    if kind == "top_k":
        return f"{count(number)} of {many}{', ascending' if row['kind'] == 'ascending' else ''}"
    if kind == "bincount":
        return f"{many} into {count(number)} bins{', all into one' if row['kind'] == 'one' else ''}"
    if kind == "searchsorted":
        return f"{count(width)} in {count(number)} numbers"
    if kind == "route":
        return f"{count(rows)} tokens, {width} experts, {number} each"
    return f"{count(rows)} rows of {count(width)} logits, {number} kept" if kind == "sample" else many


def _unchanged(row: dict[str, Any]) -> str:
    """A program that selects has its name; single operations are described by their sizes."""
    kind, words = row["op"], row["case"].split()
    if kind == "program":
        return row["case"]
    numbers = [int(n) for n in re.findall(r"\d+", row["case"])]
    if kind == "bincount":
        return f"{count(numbers[0])} numbers into {count(numbers[1])} bins"
    if kind == "searchsorted":
        method = {"scan": "by steps", "scan_unrolled": "unrolled", "compare_all": "all compared"}[words[-1]]
        return f"{count(numbers[0])} in {count(numbers[1])} numbers, {method}"
    rows = rows_of(*numbers[:2]) + (" int32" if words[-1] == "int32" else "")
    return f"{count(numbers[2])} of {rows}" if kind in ("top_k", "part") else rows


_CASES = {
    "norm": _norm,
    "fused_softmax": _attention,
    "score": _attention,
    "cross_entropy": _loss,
    "linear_cross_entropy": _head,
    "scan": _loop,
    "while_loop": _lanes,
    "associative_scan": _cumulative,
    "messages": _edges,
    "segment_softmax": _segments,
    "index_add": _indices,
    "scatter": _indices,
    "sparse": _sparse,
    "select": _selected,
    "selected": _unchanged,
    "programs": lambda row: program(row["case"]),
    "sharding": lambda row: f"{SPLITS.get(row['of'], row['of'])}, {row['devices']} device{'s' * (row['devices'] > 1)}",
}
