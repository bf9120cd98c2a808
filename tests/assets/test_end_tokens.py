"""Where a response ends: all that either file of a checkpoint names survives the assets stage."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from pat.assets import models
from pat.model import UnsupportedModel


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint as one downloads it: the tokenizer ends at token 1."""
    folder = tmp_path_factory.mktemp("checkpoint")
    models.write("tiny-qwen3", "float32", (1,), 0, folder)
    return folder


@pytest.fixture
def write(checkpoint, tmp_path):
    """write(config=, generation=): both files as assets leaves them, for what the checkpoint's files say."""

    def make(config=None, generation=None):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        for file in checkpoint.iterdir():
            (source / file.name).unlink(missing_ok=True)
            (source / file.name).symlink_to(file)
        for name, said in (("config.json", config or {}), ("generation_config.json", generation or {})):
            raw = json.loads((checkpoint / name).read_text())
            del raw["eos_token_id"]
            (source / name).unlink()
            (source / name).write_text(json.dumps(raw | said))
        models.write(str(source), "float32", (1,), 0, tmp_path / "model")
        return [
            json.loads((tmp_path / "model" / name).read_text()) for name in ("config.json", "generation_config.json")
        ]

    return make


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ([1, 0, 4], None, [1, 0, 4]),
        (None, [1, 0, 4], [1, 0, 4]),
        (0, 4, [1, 0, 4]),
        ([4, 0], [0, 7], [1, 4, 0, 7]),
        (None, 1, 1),
        (None, None, 1),
    ],
)
def test_all_ends_that_either_file_names_are_in_both(write, tmp_path, config, generation, ends):
    said = [{} if value is None else {"eos_token_id": value} for value in (config, generation)]
    assert [file["eos_token_id"] for file in write(*said)] == [ends, ends]
    facts = json.loads((tmp_path / "model" / "pat.json").read_text())
    assert facts["end_tokens"] == (ends if isinstance(ends, list) else [ends])


def test_ends_that_a_decoded_response_shows_are_told(checkpoint, write, tmp_path):
    newline = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids("\n")
    write(generation={"eos_token_id": [0, newline]})  # 0 is a special token
    assert json.loads((tmp_path / "model" / "pat.json").read_text())["end_texts"] == ["\n"]


@pytest.mark.parametrize("wrong", ["</s>", [1, "x"], -1, True])
def test_an_end_that_is_no_token_is_refused_with_its_file(write, wrong):
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json: eos_token_id is .*; allowed: a token id"):
        write(generation={"eos_token_id": wrong})


@pytest.mark.parametrize("said", [{"temperature": 0.6}, {"top_p": 0.9, "temperature": 0.6, "do_sample": False}])
def test_sampling_that_is_set_without_do_sample_is_kept(write, tmp_path, said):
    _, saved = write(generation={"eos_token_id": [1, 0]} | said)
    assert (saved["do_sample"], saved["temperature"], saved.get("top_p")) == (True, 0.6, said.get("top_p"))
    assert saved["eos_token_id"] == [1, 0]
    assert GenerationConfig.from_pretrained(tmp_path / "model").temperature == 0.6


def test_of_what_cannot_be_saved_at_all_the_tokens_are_kept_and_it_is_told(write, capsys):
    _, saved = write(generation={"eos_token_id": [1, 0], "length_penalty": 2.0, "temperature": 0.6})
    assert saved["eos_token_id"] == [1, 0]
    assert not {"length_penalty", "temperature"} & set(saved)
    assert "generation_config.json: only its tokens are kept: " in capsys.readouterr().out
