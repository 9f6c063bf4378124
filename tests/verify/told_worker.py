"""What stands in for VerifyWorker: it answers, when it is heard, what it was told."""

from __future__ import annotations

from typing import Any


class Told:
    """A subclass has `ask`."""

    def tell(self, command: Any) -> None:
        self._told = command

    def hear(self, answer: Any, **options: Any) -> Any:
        return self.ask(self._told, answer, **options)

    def ask(self, command: Any, answer: Any, **options: Any) -> Any:
        raise NotImplementedError
