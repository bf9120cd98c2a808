"""Deals the requests of an iteration to the servers in turn, the same way in every arm.

verl's own router takes the server with the fewest requests in flight and breaks ties at random. Then the longest
responses of an iteration would meet on one server in one arm and not in another, and no server could tell which
sample of its prompt a request is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pat.rl import verl_api as verl
from pat.rl.identity import Numbering


@dataclass(frozen=True)
class Numbered:
    """A server's handle for one request: ``generate.remote`` also tells the server the request's number."""

    server: Any
    number: tuple[int, int]  # see Numbering.next

    @property
    def generate(self) -> Numbered:
        return self

    def remote(self, **request):
        return self.server.generate.remote(**request, number=self.number)


class Router(verl.GlobalRequestLoadBalancer):
    """An actor of verl's (``rollout.router_config_path`` names a file with these settings, and ``router_class``).

    servers: actor handles by address. settings: ``requests`` of an iteration on all servers, after which the next
    iteration begins, and ``samples`` of a prompt. The k-th request goes to server k modulo their number.
    """

    def __init__(self, servers: dict[str, Any], settings: dict[str, Any]) -> None:
        super().__init__(servers)
        self._requests, self._samples = settings["requests"], settings["samples"]
        self._left = 0

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: list[int]) -> tuple[str, Numbered]:
        if not self._left:
            self._left, self._numbering = self._requests, Numbering(self._samples)
        self._left -= 1
        number = self._numbering.next(prompt_ids)
        addresses = self.get_all_servers()
        address = addresses[number[0] % len(addresses)]
        self._inflight_requests[address] += 1  # release_server, verl's own, takes it off
        return address, Numbered(self._servers[address], number)
