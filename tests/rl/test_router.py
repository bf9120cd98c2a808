"""Requests are dealt to the servers in turn, by number, and a server learns the number."""

import pickle
from collections import Counter

from pat.rl.router import Numbered, Router


class Server:
    """Stands for a Ray actor's handle: notes the arguments of ``generate.remote``."""

    def __init__(self):
        self.asked = []
        self.generate = self

    def remote(self, **request):
        self.asked.append(request)


def router(servers=2, requests=8, samples=4):
    handles = {f"pat-{number}": Server() for number in range(servers)}
    return Router(handles, {"router_class": "...", "requests": requests, "samples": samples}), handles


def deal(made, prompts):
    return [made.acquire_server(f"id {number}", prompt_ids=prompt) for number, prompt in enumerate(prompts)]


def test_each_server_gets_its_share_of_each_prompt_whatever_the_order_of_arrival():
    made, handles = router()
    prompts = [[1], [1], [2], [1], [2], [2], [2], [1]]
    dealt = deal(made, prompts)
    shares = Counter((address, tuple(prompt)) for (address, _), prompt in zip(dealt, prompts, strict=True))
    assert shares == {(address, prompt): 2 for address in handles for prompt in ((1,), (2,))}
    assert sorted(numbered.number for _, numbered in dealt) == [(k, k % 4) for k in range(8)]
    assert all(numbered.server is handles[address] for address, numbered in dealt)


def test_more_servers_than_samples_have_work_too():
    made, handles = router(servers=3, requests=6, samples=2)
    assert Counter(address for address, _ in deal(made, [[1], [1], [2], [2], [3], [3]])) == dict.fromkeys(handles, 2)


def test_an_iteration_begins_with_the_first_number_again():
    made, _ = router(requests=2, samples=2)
    first, second = deal(made, [[5], [5]]), deal(made, [[7], [7]])
    assert [n.number for _, n in first] == [n.number for _, n in second] == [(0, 0), (1, 1)]
    assert [address for address, _ in first] == [address for address, _ in second]


def test_the_server_is_told_the_number_with_the_request():
    server = Server()
    Numbered(server, (5, 1)).generate.remote(request_id="r", prompt_ids=[1])
    assert server.asked == [{"request_id": "r", "prompt_ids": [1], "number": (5, 1)}]
    assert pickle.loads(pickle.dumps(Numbered("handle", (5, 1)))) == Numbered("handle", (5, 1))  # it goes through Ray


def test_verls_own_count_of_what_is_in_flight_stays_right():
    made, _ = router()
    (address, _), *_ = deal(made, [[1], [1], [1]])
    assert made.get_total_inflight() == 3
    made.release_server(address, request_id="id 0")
    assert made.get_total_inflight() == 2
    assert made.require_acquire_fields() == ["prompt_ids"]
