"""The sets of what a size needs: built under that size's context, swapped whole, measured against a budget."""

import ast
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from pat.engine import runtime
from pat.engine.device import Cpu
from pat.engine.runtime import KEPT, WARMED_UP, GraphMemoryError, Runtimes

GIVEN = ("cuda_graph_config", "cuda_graph_bs_decode", "cuda_graph_max_bs_decode")


class Runner:
    """SGLang's model runner as far as sets are concerned: what it builds says for which tp it was built."""

    def __init__(self, context, prefill_graphs=True):
        self.context, self.prefill_graphs = context, prefill_graphs
        self.device, self.capture_tail_hooks, self.capture_head_hooks = "cpu", [], []
        self.model, self.req_to_token_pool = "model 1", SimpleNamespace(size=1500)
        self.server_args = SimpleNamespace(**dict.fromkeys(GIVEN))
        self.stray = self.error = None
        self.init_attention_backends()
        self.init_cuda_graphs()

    def made(self, name):
        return f"{name} of tp {self.context.tp_size} around {self.model}"

    def init_attention_backends(self):
        self.attn_backend = self.made("attention backend")
        self.decode_attn_backend_group = [self.made("decode backend")]

    def init_cuda_graphs(self):
        if self.error:
            raise self.error
        if self.prefill_graphs:
            self.attention_layers = [self.made("layer")]
        self.eager_runner = self.made("eager runner")
        self.decode_cuda_graph_runner = self.made("decode graphs")
        self.decode_cuda_graph_capture_bs = self.context.decode.bs
        self.decode_cuda_graph_captured = self.context.decode.backend
        self.graph_memory_usage = {"prefill": 0.5, "decode": 0.25}
        if self.stray:
            setattr(self, self.stray, self.made(self.stray))

    def kept(self):
        return {name: value for name, value in vars(self).items() if name in KEPT}


class Accelerator(Cpu):
    """A device of 1000 bytes that reads out what the test says it uses."""

    captures_graphs = True
    total_bytes = 1000

    def __init__(self, used=()):
        super().__init__("cpu")
        self.used, self.connected = list(used), []

    def used_bytes(self):
        return self.used.pop(0)

    def connect(self, group):
        self.connected.append(group)


@pytest.fixture
def context(monkeypatch):
    """SGLang's parallel context; at(tp) makes it that of another size."""
    decode = SimpleNamespace(backend="full", bs=[1, 2, 4, 8, 64, 256], max_bs=256)
    made = SimpleNamespace(tp_size=1, tp_group=None, decode=decode)

    def at(tp):
        made.tp_size, made.tp_group = tp, SimpleNamespace(device_group=f"group of tp {tp}")

    made.at = at
    at(1)
    executed = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode)))
    monkeypatch.setattr(runtime, "sg", SimpleNamespace(get_parallel=lambda: made, get_exec=lambda: executed))
    return made


def build(context, runner, sizes=(2, 4), **options):
    runtimes = Runtimes(runner, device=options.pop("device", Accelerator([0] * 20)), **options)
    for tp in sizes:
        context.at(tp)
        runtimes.add(tp, f"model {tp}")
    context.at(1)
    runtimes.use(1)
    return runtimes


@pytest.mark.parametrize("prefill_graphs", [True, False])
def test_each_size_gets_back_exactly_what_was_built_for_it(context, prefill_graphs):
    runner = Runner(context, prefill_graphs)
    untouched = runner.req_to_token_pool
    seen = {1: runner.kept()}
    runtimes = Runtimes(runner, device=Accelerator([0] * 4))
    for tp in (2, 4):
        context.at(tp)
        runtimes.add(tp, f"model {tp}")
        assert runtimes.tp == tp
        seen[tp] = runner.kept()
    for tp in (1, 4, 2, 2, 1):
        runtimes.use(tp)
        kept = runner.kept()
        assert kept.keys() == seen[tp].keys()
        assert all(kept[name] is seen[tp][name] for name in kept)
        assert runner.model == f"model {tp}"
        assert f"tp {tp} around model {tp}" in runner.decode_cuda_graph_runner
        assert ("attention_layers" in kept) is prefill_graphs
    assert runner.req_to_token_pool is untouched


def test_what_is_absent_at_a_size_is_taken_away(context):
    runner = Runner(context, prefill_graphs=False)
    runtimes = Runtimes(runner, device=Accelerator([0] * 2))
    context.at(2)
    runner.prefill_graphs = True
    runtimes.add(2, "model 2")
    assert runner.attention_layers
    runtimes.use(1)
    assert not hasattr(runner, "attention_layers")
    runtimes.use(2)
    assert runner.attention_layers


def test_graphs_that_sglang_captures_anew_stay_with_their_size(context):
    runner = Runner(context)
    runtimes = build(context, runner)
    runner.decode_cuda_graph_runner = "captured again"
    runtimes.use(2)
    assert runner.decode_cuda_graph_runner != "captured again"
    runtimes.use(1)
    assert runner.decode_cuda_graph_runner == "captured again"


def test_what_a_later_sglang_sets_as_well_is_kept_too_and_told(context, caplog):
    runner = Runner(context)
    runner.stray, runner.new_workspace = "new_workspace", "of the base"
    with caplog.at_level(logging.WARNING, "sglang.pat"):
        runtimes = build(context, runner)
    assert "['new_workspace']" in caplog.text
    for tp in (2, 1, 4):
        runtimes.use(tp)
        assert runner.new_workspace == ("of the base" if tp == 1 else f"new_workspace of tp {tp} around model {tp}")


def test_kernels_are_warmed_up_for_each_size_and_its_group_is_connected_first(context):
    runner = Runner(context)
    warmed = []
    setattr(runner, WARMED_UP, True)
    runner.init_attention_backends = lambda: warmed.append(getattr(runner, WARMED_UP))
    device = Accelerator([0] * 4)
    build(context, runner, device=device)
    assert warmed == [False, False]
    assert device.connected == ["group of tp 2", "group of tp 4"]


def test_memory_is_counted_for_each_size(context):
    runner = Runner(context)
    device = Accelerator([100, 140, 150, 145])
    runtimes = build(context, runner, device=device)
    assert runtimes.memory_bytes == {1: 3 << 28, 2: 40, 4: 0}


@pytest.mark.parametrize(("budget", "allowed"), [(None, 50), (70, 70)])
def test_too_much_memory_names_the_size_the_bytes_and_the_options(context, budget, allowed):
    runner = Runner(context)
    with pytest.raises(GraphMemoryError) as caught:
        build(context, runner, device=Accelerator([100, 100 + allowed, 0, allowed + 1]), budget_bytes=budget)
    text = str(caught.value)
    for part in ("tp 4", f"took {allowed + 1} bytes", f"the {allowed} ", "cuda_graph_max_bs_decode", "graph_memory_by"):
        assert part in text


def captured(context, runner, budget_bytes=1 << 30):
    """{tp: batches that are captured}."""
    runtimes = build(context, runner, budget_bytes=budget_bytes)
    assert (context.decode.bs, context.decode.max_bs) == ([1, 2, 4, 8, 64, 256], 256)  # is SGLang's again
    found = {}
    for tp in (1, 2, 4):
        runtimes.use(tp)
        found[tp] = runner.decode_cuda_graph_capture_bs
    return found


def test_a_wide_replica_captures_the_batches_of_as_many_narrow_ones(context):
    found = captured(context, Runner(context))
    assert found[1] == [1, 2, 4, 8, 64, 256]
    assert found[2] == [*found[1], 288, 320, 352, 384, 416, 448, 480, 512]
    assert found[4] == [*found[2], 576, 640, 704, 768, 832, 896, 960, 1024]


def test_no_batch_is_captured_that_cannot_run_or_that_the_budget_does_not_hold(context):
    runner = Runner(context)
    runner.req_to_token_pool.size = 300  # at most so many requests
    assert captured(context, runner)[4][-2:] == [288, 300]
    # The fake's decode graphs of 256 rows have taken 256 MiB: a budget of 400 MiB holds 400 rows.
    assert captured(context, Runner(context), budget_bytes=400 << 20)[4][-2:] == [384, 400]
    assert captured(context, Runner(context), budget_bytes=1)[4][-1] == 256


@pytest.mark.parametrize("name", GIVEN)
def test_the_users_list_is_every_sizes(context, name):
    runner = Runner(context)
    setattr(runner.server_args, name, [1, 2])
    assert captured(context, runner)[4] == [1, 2, 4, 8, 64, 256]


def test_the_graphs_of_wide_sizes_can_be_of_another_kind(context):
    runner = Runner(context)
    runtimes = build(context, runner, backend="breakable")
    for tp, backend in ((1, "full"), (2, "breakable"), (4, "breakable")):
        runtimes.use(tp)
        assert runner.decode_cuda_graph_captured == backend
    assert context.decode.backend == "full"


def test_a_cpu_has_no_budget(context):
    runtimes = build(context, Runner(context), device=Cpu(), sizes=())
    context.at(2)
    runtimes.device.connect = lambda group: None
    runtimes.add(2, "model 2")
    assert runtimes.memory_bytes[2] == runtimes.budget_bytes == 0


def test_an_error_while_building_says_for_which_size(context):
    runner = Runner(context)
    runner.error = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        build(context, runner)
    assert "tp 2" in caught.value.__notes__[0]
    assert "mem_fraction_static" in caught.value.__notes__[0]


def test_a_size_is_built_once_and_under_its_own_context(context):
    runtimes = build(context, Runner(context))
    with pytest.raises(ValueError, match="built already"):
        runtimes.add(2, "model 2")
    with pytest.raises(ValueError, match="of tp 1, not of tp 8"):
        runtimes.add(8, "model 8")
    with pytest.raises(ValueError, match=r"tp 8 is not one of \[1, 2, 4\]"):
        runtimes.use(8)


def test_kernels_of_a_whole_model_are_refused(context):
    runner = Runner(context)
    runner.capture_tail_hooks.append(print)
    with pytest.raises(ValueError, match="one size only"):
        build(context, runner)


def assigned(file: str, names: set[str], functions: set[str]) -> set[str]:
    """Attributes that functions of one of SGLang's files assign to a variable of one of these names."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt")
    targets = [
        target
        for function in ast.walk(ast.parse((root / file).read_text()))
        if isinstance(function, ast.FunctionDef) and function.name in functions
        for statement in ast.walk(function)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    ]
    targets += [part for target in targets if isinstance(target, ast.Tuple) for part in target.elts]
    return {t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", None) in names}


def test_the_list_is_what_sglang_sets_for_a_size():
    components = "model_executor/model_runner_components"
    found = assigned("model_executor/model_runner.py", {"self"}, {"init_attention_backends", "init_cuda_graphs"})
    found |= assigned(
        f"{components}/cuda_graph_setup.py",
        {"model_runner"},
        {"capture_cuda_graphs", "capture_prefill_graph", "capture_decode_graph", "finalize_cuda_graph_capture"},
    )
    found |= assigned(
        f"{components}/attention_backend_setup.py",
        {"model_runner"},
        {"build_attention_backends", "_build_full_attention_backend_from_str"},
    )
    found |= assigned("layers/attention/attention_registry.py", {"runner"}, {"attn_backend_wrapper"})
    assert found | {"model"} == set(KEPT)
    assert assigned("model_executor/runner/base_runner.py", {"mr"}, {"_warmup"}) == {WARMED_UP}
