"""What the papers say each device runs, written as words, with nothing of pipeplan's.

A word is a kind and a chunk (the device's stages in order, 0 by default): ``F``, ``B1``, ``I``, ``W1``. Each takes the
next micro-batch of its chunk; a word with nothing left is passed over, so that sequences need no ends. D devices, N
micro-batches, C chunks per device in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Words = Iterable[str]


def gpipe(device: int, D: int, N: int, C: int) -> Words:
    """GPipe (NeurIPS'19), Fig. 2 (c); where backward is split, all I before all W."""
    return ["F"] * N + ["B"] * N + ["I"] * N + ["W"] * N


def one_forward_one_backward(device: int, D: int, N: int, C: int) -> Words:
    """DAPPLE (PPoPP'21), Fig. 3 (b): D - d forwards, then a backward and a forward in turn."""
    return ["F"] * (D - device) + ["B", "I", "W", "F"] * N


def interleaved(device: int, D: int, N: int, C: int) -> Words:
    """Megatron-LM (SC'21), Fig. 4, below: the k-th forward is of chunk (k mod C D) // D, backwards the other way."""
    return _alternating(2 * (D - 1 - device), min(D, N), N, C, ["B", "I", "W"], late=0)


def interleaved_zero_bubble(device: int, D: int, N: int, C: int) -> Words:
    """torch.distributed.pipelining: fewer forwards ahead, and weight gradients d backwards late on device d."""
    return _alternating(D - 1 - device, min(D, N), N, C, ["I"], late=device)


def _alternating(ahead: int, group: int, N: int, C: int, back: list[str], late: int) -> Words:
    """(C - 1) groups and ``ahead`` forwards first, then a forward and a backward in turn."""
    chunks = [k % (C * group) // group for k in range(C * N)]
    warmup = min((C - 1) * group + ahead, C * N)
    onward = [f"F{chunk}" for chunk in chunks]
    yield from onward[:warmup]
    for k, chunk in enumerate(C - 1 - chunk for chunk in chunks):
        yield from onward[warmup + k : warmup + k + 1]
        yield from (f"{kind}{chunk}" for kind in back)
        if back == ["I"] and k >= late:
            yield "W*"
    yield from ["W*"] * (C * N)


def breadth_first(device: int, D: int, N: int, C: int) -> Words:
    """Breadth-first pipeline parallelism (MLSys'23), Fig. 4: chunk after chunk."""
    for chunk in range(C):
        yield from [f"F{chunk}"] * N
    for chunk in reversed(range(C)):
        yield from [f"B{chunk}", f"I{chunk}", f"W{chunk}"] * N


def zb_h1(device: int, D: int, N: int, C: int) -> Words:
    """Zero Bubble (ICLR'24), Fig. 3 above: as 1F1B, weight gradients d backwards late."""
    return ["F"] * (D - device) + ["I", "F"] * device + ["I", "W", "F"] * N + ["W"] * N


def zb_h2(device: int, D: int, N: int, C: int) -> Words:
    """The same, below: 2 (D - d) - 1 forwards ahead, weight gradients 2 d backwards late."""
    return ["F"] * (2 * (D - device) - 1) + ["I", "F"] * (2 * device) + ["I", "W", "F"] * N + ["W"] * N


def chimera(device: int, D: int, N: int, C: int) -> Words:
    """Chimera (SC'21), III-A and III-C: equal slots; N micro-batches each way, chunk 0 the way down."""
    slots: list[tuple[int, str]] = []
    for chunk, place in enumerate((device, D - 1 - device)):
        for n in range(N):
            begin = 2 * D * (n // (D // 2)) + 2 * (n % (D // 2))
            slots += [(begin + place, f"F{chunk}"), (begin + 2 * D - 1 - place, f"B{chunk} I{chunk} W{chunk}")]
    return " ".join(words for _, words in sorted(slots)).split()


KNOWN: dict[str, Callable[[int, int, int, int], Words]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved-1f1b": interleaved,
    "interleaved-zb": interleaved_zero_bubble,
    "looped-bfs": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "chimera": chimera,
}


def known_orders(name: str, stages: list[list[int]], N: int, *, split: bool) -> list[str]:
    """Every device's actions as text; ``stages`` [device] its stages by chunk."""
    D, C = len(stages), len(stages[0])
    return [" ".join(_texts(KNOWN[name](device, D, N, C), own, N, split)) for device, own in enumerate(stages)]


def _texts(words: Words, stages: list[int], N: int, split: bool) -> Iterable[str]:
    """The words as actions; of B, I and W those that there are; ``W*`` is the oldest weight gradient owed."""
    done = {(kind, chunk): 0 for kind in "FBIW" for chunk in range(len(stages))}
    owed: list[int] = []
    for word in words:
        kind = word[0]
        if kind in ("B" if split else "IW") or (word == "W*" and not owed):
            continue
        chunk = owed.pop(0) if word == "W*" else int(word[1:] or 0)
        if done[kind, chunk] < N:
            yield f"{stages[chunk]}{kind}{done[kind, chunk]}"
            done[kind, chunk] += 1
            owed += [chunk] if kind == "I" else []
