"""Penalties are a request's own: of all its tokens, whatever the scheduler knows when, and whoever else is there."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from pat.engine import penalties
from pat.engine import sglang_api as sg
from tests.engine.conftest import Driver, Reference, ids, jobs, start

pytestmark = pytest.mark.engine

ALL = {"frequency_penalty": 0.3, "presence_penalty": 1.5, "repetition_penalty": 1.2, "min_new_tokens": 3}
PARAMS = [
    {"frequency_penalty": 0.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {},
]


def requests():
    made = jobs((50, 90, 70, 60))
    for job, params in zip(made, PARAMS, strict=True):
        job.params = params
    return made


@pytest.fixture(scope="module", params=[True, False], ids=["no overlap", "overlap"])
def driver(request, model_folder):
    engine = start(model_folder("qwen3"), tp_sizes=(1, 2), disable_overlap_schedule=request.param)
    made = Driver(engine)
    yield made
    engine.shutdown()


def penalised_greedily(reference, job):
    """Hugging Face's logits, penalised token by token."""
    torch, params, tokens = reference.torch, job.params, []
    while len(tokens) < job.tokens:
        with torch.no_grad():
            logits = reference.model(torch.tensor([job.prompt + tokens])).logits[0, -1].float()
        for token in set(tokens):
            logits[token] -= params.get("frequency_penalty", 0) * tokens.count(token) + params.get(
                "presence_penalty", 0
            )
        for token in set(tokens):
            scale = params.get("repetition_penalty", 1)
            logits[token] = logits[token] * scale if logits[token] < 0 else logits[token] / scale
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("switches", [[], [(5, 2, "migrate"), (15, 1, "recompute"), (30, 2, "migrate")]], ids=len)
def test_they_count_every_token_once(driver, model_folder, switches):
    reference = Reference(model_folder("qwen3"))
    outputs = driver.run(requests(), switches=switches)
    assert ids(outputs) == [penalised_greedily(reference, job) for job in requests()]


def test_a_prefill_of_others_between_two_steps_counts_nothing_twice(driver):
    alone = [ids(driver.run([job]))[0] for job in requests()]
    others = jobs((4,) * 24)

    async def prefills():
        for job in others:
            await driver.request(job, 0.0)

    assert ids(driver.run(requests(), switches=[(6, 2, "migrate")], during=prefills)) == alone


@dataclass(eq=False)
class Batch:
    reqs: list
    prebuilt: bool = False
    device: str = "cpu"

    @property
    def forward_mode(self):
        return SimpleNamespace(is_prebuilt=lambda: self.prebuilt)


def test_a_history_counts_as_sglang_counts_it_token_by_token():
    import torch
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.sampling_params import SamplingParams

    kinds = set(penaltylib.orchestrator._BatchedPenalizer.__subclasses__())
    assert {kind.__name__ for kind in kinds} == set(sg.COUNTED)
    params = SamplingParams(stop_token_ids=[7], **ALL)
    reqs = [
        SimpleNamespace(
            sampling_params=params,
            output_ids=output,
            eos_token_ids=set(),
            tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=7),
        )
        for output in ([5, 5, 5, 9], [], [3, 9])
    ]
    reqs[1].sampling_params = SamplingParams()  # not penalised
    batch = Batch(reqs)
    ours = penalties.with_history(penaltylib.BatchedPenalizerOrchestrator(12, batch, kinds), batch)
    for row, req in enumerate(reqs):
        alone = Batch([req])
        sglangs = penaltylib.BatchedPenalizerOrchestrator(12, alone, kinds)
        for token in req.output_ids:
            sglangs.cumulate_output_tokens(torch.tensor([token]))
        logits = torch.linspace(-2, 2, 36).view(3, 12)
        expected, got = logits[row : row + 1].clone(), logits.clone()
        sglangs.apply(expected)
        ours.apply(got)
        assert torch.allclose(got[row], expected[0], rtol=1e-6)
