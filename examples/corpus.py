"""Text to train on, and its tokens: Python sources as bytes, or byte pairs.

The text is every .py file under a folder. A file is held out for one in twenty values of a checksum
of its name, so the split depends on no seed and stays when other files come or go.

Byte pairs: text is cut into words (a run of letters, of digits, of marks, each with the space
before it, or white space). Inside words the most frequent pair of neighbouring tokens becomes a new
token, again and again (Sennrich, Haddow and Birch, 2016, on bytes as in GPT-2). Ids 0..255 are the
bytes and id 256 + k the k-th merge. Nothing is lost, so bits per token turn into bits per byte
exactly. Training 50001 merges on 30 MB takes some twenty seconds of plain Python.
"""

import collections
import heapq
import math
import pathlib
import re
import zlib

import numpy as np
from tqdm import tqdm

# Every byte is in exactly one class, so the words of a text always join back to the text.
WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def merge(word, pair, new):
    """`word` (a list of ids) with every occurrence of `pair`, left to right, replaced by `new`."""
    merged, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(new)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


def train(texts, merges):
    """The list of `merges` pairs to merge, in order; shorter if no pair is left that occurs twice."""
    counts = collections.Counter()
    for text in texts:
        counts.update(WORD.findall(text))
    words, frequency = [list(word) for word in counts], list(counts.values())

    pair_count, words_with = collections.Counter(), collections.defaultdict(set)
    for index, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pair_count[pair] += frequency[index]
            words_with[pair].add(index)

    # A heap entry whose count is no longer the pair's count is stale: a newer one was pushed.
    heap = [(-count, pair) for pair, count in pair_count.items()]
    heapq.heapify(heap)
    pairs = []
    for new in tqdm(range(256, 256 + merges), desc="byte pairs", unit="merge"):
        while heap and -heap[0][0] != pair_count[heap[0][1]]:
            heapq.heappop(heap)
        if not heap or -heap[0][0] < 2:
            break
        best = heapq.heappop(heap)[1]
        pairs.append(best)
        changed = set()
        for index in words_with.pop(best):
            old, words[index] = words[index], merge(words[index], best, new)
            if len(words[index]) == len(old):
                continue  # an earlier merge had already taken the pair out of this word
            for pair in zip(old, old[1:]):
                pair_count[pair] -= frequency[index]
                changed.add(pair)
            for pair in zip(words[index], words[index][1:]):
                pair_count[pair] += frequency[index]
                words_with[pair].add(index)
                changed.add(pair)
        for pair in changed:
            heapq.heappush(heap, (-pair_count[pair], pair))
    return pairs


def token_bytes(pairs):
    """The bytes of every token id."""
    table = [bytes([byte]) for byte in range(256)]
    for left, right in pairs:
        table.append(table[left] + table[right])
    return table


def encoder(pairs):
    """A function from bytes to a numpy array of token ids; it remembers the words it has seen."""
    rank = {pair: 256 + k for k, pair in enumerate(pairs)}
    seen = {}

    def encode_word(word):
        ids = list(word)
        while len(ids) > 1:
            pair = min(zip(ids, ids[1:]), key=lambda pair: rank.get(pair, 1 << 30))
            if pair not in rank:
                break
            ids = merge(ids, pair, rank[pair])
        return ids

    def encode(text):
        ids = []
        for word in WORD.findall(text):
            if word not in seen:
                seen[word] = encode_word(word)
            ids.extend(seen[word])
        return np.array(ids, np.uint16 if 256 + len(pairs) <= 1 << 16 else np.int32)

    return encode


def read_text(folder):
    """The .py files under `folder`, without installed packages: training texts, held-out texts."""
    texts = [], []
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        name = path.relative_to(folder)
        if not {"site-packages", "dist-packages"} & set(name.parts) and path.is_file():
            held_out = zlib.crc32(name.as_posix().encode()) % 20 == 0
            texts[held_out].append(path.read_bytes() + b"\0")
    return texts


def tokenize(training, heldout, vocabulary):
    """Two arrays of token ids, and the number of bytes that each id stands for."""
    if vocabulary == 256:
        training, heldout = (np.frombuffer(b"".join(texts), np.uint8) for texts in (training, heldout))
        return training, heldout, np.ones(256, np.int64)
    pairs = train(training, vocabulary - 256)
    encode = encoder(pairs)
    training, heldout = (np.concatenate([encode(text) for text in texts]) for texts in (training, heldout))
    return training, heldout, np.array([len(token) for token in token_bytes(pairs)])


def cut_windows(tokens, starts, context):
    """One row of context + 1 tokens from each start: inputs and, one to the right, their targets."""
    return tokens[np.asarray(starts)[:, None] + np.arange(context + 1)].astype(np.int32)


def even_windows(tokens, context, batch, count):
    """About `count` windows spread evenly over the text, in whole batches: (batches, batch, ids)."""
    count = max(1, count // batch) * batch
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(int)
    return cut_windows(tokens, starts, context).reshape(-1, batch, context + 1)


def bits_per_byte(windows, bytes_of):
    """What turns the mean nats a token of these windows into bits per byte of their targets."""
    targets = windows[..., 1:]
    return targets.size / bytes_of[targets].sum() / math.log(2)
