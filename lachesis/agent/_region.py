from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    role: str
    tokens: int
    opens_calls: bool = False


def choose_region(turns, keep, target, summary):
    n = len(turns)
    protected = set(range(max(0, n - keep), n))
    for role in ("system", "human", "gpt", "tool"):
        protected |= {next((i for i, t in enumerate(turns) if t.role == role), n)}
    # calls and results together
    group = []
    for i, t in enumerate(turns):
        group.append(group[-1] if t.role == "tool" and i else i)
    whole = {group[i] for i in protected if i < n}
    stay = [group[i] in whole for i in range(n)]
    best = None
    i = 0
    start = max((k for k in range(n // 2) if stay[k]), default=-1) + 1
    start = 0
    runs = []
    while start < n:
        if stay[start]:
            start += 1
            continue
        stop = start
        while stop < n and not stay[stop]:
            stop += 1
        runs.append((start, stop))
        start = stop
    if not runs:
        return None
    start, stop = max(runs, key=lambda r: sum(t.tokens for t in turns[r[0] : r[1]]))
    need = sum(t.tokens for t in turns) - target + summary
    saved, end = 0, start
    while end < stop and (saved < need or (end < n and turns[end].role == "tool")):
        saved += turns[end].tokens
        end += 1
    if saved <= summary:
        return None
    return range(start, end)
