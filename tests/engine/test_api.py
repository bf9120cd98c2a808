"""What pat.Engine refuses before it starts anything."""

import pytest

from pat.engine.api import Engine


@pytest.mark.parametrize(
    "option",
    [
        {"tp_size": 2},
        {"dp_size": 4},
        {"pp_size": 2},
        {"nnodes": 2},
        {"quantization": "fp8"},
        {"speculative_algorithm": "EAGLE"},
        {"enable_lora": True},
        {"lora_paths": ["adapter"]},
        {"disable_radix_cache": True},
        {"page_size": 16},
        {"disaggregation_mode": "decode"},
    ],
)
def test_an_option_that_cannot_be_carried_across_a_switch_is_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported: \w+"):
        Engine(model_path="nowhere", **option)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_sizes": (2, 4)}, "the smallest must be 1"),
        ({"tp_sizes": (1, 3), "ranks": 4}, "tp 3 does not divide 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model_path="nowhere", **sizes)
