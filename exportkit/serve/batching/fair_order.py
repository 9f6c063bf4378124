"""In which order the requests of several clients run: none waits behind all that another one has sent.

Start-time fair queueing. Each request gets a tag: the rows that its client had before it, counted from what ran last.
The smallest tag runs first. While two clients wait, the rows that ran of one and of the other differ by no more than
what a batch and a request of each have. A single client's requests run in the order in which they came.
"""

from __future__ import annotations


class FairOrder:
    """Gives requests their tags. The queue is told when it is empty."""

    def __init__(self) -> None:
        self._now = 0  # the largest tag with which a batch began
        self._next: dict[str, int] = {}  # by client: the tag of its next request, if it waits for those before it

    def tag(self, client: str, rows: int) -> int:
        """Returns the tag of a request that begins to wait."""
        start = max(self._now, self._next.get(client, 0))
        self._next[client] = start + rows
        return start

    def ran(self, tag: int) -> None:
        """A batch runs, of which this is the smallest tag."""
        self._now = max(self._now, tag)

    def empty(self) -> None:
        """Nothing waits: nobody is behind anybody."""
        self._now = 0
        self._next.clear()


def beyond_share(own: int, more: int, free: int) -> bool:
    """Whether a client that has `own` of the room may not have `more`: then it would have more than is left.

    So whoever has nothing finds room beside N clients that take what they can: a part in N + 1.
    """
    return own > 0 and own + more > free - more
