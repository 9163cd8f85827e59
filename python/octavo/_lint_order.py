"""The best order of many parts: by what is reused of whole parts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

#: How much is looked at; then what is known has to do.
_MOST_STEPS = 4_000_000


class Table:
    """Prompts by parts, each text a number."""

    def __init__(self, prompts: Sequence[Mapping[str, str]], names: Sequence[str], count: Callable[[str], int]) -> None:
        texts: dict[str | None, int] = {}
        self._values = [[texts.setdefault(parts.get(name), len(texts)) for parts in prompts] for name in names]
        tokens = [0 if text is None else count(text) for text in texts]
        self._tokens = [[tokens[value] for value in column] for column in self._values]
        self._prompts = range(len(prompts))

    def best_order(self) -> list[int]:
        """What a part costs depends only on which parts come before it, not on their order: it is computed once for
        every combination of texts up to it. So the best order of all parts follows from the best of every subset."""
        slots = len(self._values)
        if (1 << slots) * len(self._prompts) * slots > _MOST_STEPS:
            return self._greedy()
        classes: list[list[int]] = [[0 for _ in self._prompts]]
        best: list[tuple[int, int]] = [(0, -1)]  # of each subset: what it costs at least, and its last part
        for subset in range(1, 1 << slots):
            lowest = (subset & -subset).bit_length() - 1
            classes.append(_numbered(classes[subset & (subset - 1)], self._values[lowest]))
            first = self._first(classes[subset])
            members = [slot for slot in range(slots) if subset >> slot & 1]
            cost = {slot: sum(self._tokens[slot][i] for i in first) for slot in members}
            # Of equals the one that stands last stays last.
            least, last = min((best[subset ^ (1 << slot)][0] + cost[slot], -slot) for slot in members)
            best.append((least, -last))
        order: list[int] = []
        subset = (1 << slots) - 1
        while subset:
            order.append(best[subset][1])
            subset ^= 1 << order[-1]
        return order[::-1]

    def _greedy(self) -> list[int]:
        """Always the part next of which the least is computed again, relative to its size. That share only grows as
        more comes before it, so what was found out earlier is a bound, and few are looked at again."""
        classes, count, steps = [0 for _ in self._prompts], 1, 0
        left = [(self._again(slot, classes), slot, count) for slot in range(len(self._values))]
        heapq.heapify(left)
        order: list[int] = []
        # With every prompt in a class of its own nothing more is reused, in whatever order.
        while left and count < len(self._prompts):
            _, slot, known_at = heapq.heappop(left)
            if known_at != count and steps < _MOST_STEPS:
                steps += len(self._prompts)
                heapq.heappush(left, (self._again(slot, classes), slot, count))
                continue
            order.append(slot)
            classes = _numbered(classes, self._values[slot])
            count = max(classes) + 1
        return order + sorted(slot for _, slot, _ in left)

    def _again(self, slot: int, before: Sequence[int]) -> float:
        first = self._first(_numbered(before, self._values[slot]))
        return sum(self._tokens[slot][i] for i in first) / max(1, sum(self._tokens[slot]))

    def _first(self, classes: Sequence[int]) -> list[int]:
        """One prompt of every class."""
        return list(dict(zip(classes, self._prompts, strict=True)).values())


def _numbered(classes: Sequence[int], values: Sequence[int]) -> list[int]:
    """Every combination of a class and a value gets a number."""
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(pair, len(numbers)) for pair in zip(classes, values, strict=True)]
