"""The layer in a decoder of transformers: loss, folders, generation, row-wise training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.output import ClassTree
from lm.output.rowwise import RowAdagrad

pytestmark = pytest.mark.filterwarnings("default")  # transformers has some
TREE = ClassTree.two_level(torch.arange(60) % 7, shortlist=4)


def model_of(kind: str = "llama", **settings: Any) -> Any:
    """A small Llama or GPT-2 with the tree as its head."""
    transformers = pytest.importorskip("transformers")
    from lm.output.hf import TreeConfig, TreeForCausalLM

    sizes: dict[str, int] = {"eos_token_id": 3, "vocab_size": 60}
    if kind == "gpt2":
        sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        backbone = transformers.GPT2Config(**sizes, **dropout)
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        backbone = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    return TreeForCausalLM(TreeConfig.of(backbone, TREE, **settings)).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_loaded_by_its_own_class_alone(tied: bool, tmp_path: Path) -> None:
    model, words = model_of(tie_word_embeddings=tied), torch.randint(60, (3, 9))
    log_prob = model(words).logits
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(3, 9))
    nll = -log_prob[:, :-1].gather(2, words[:, 1:, None])
    torch.testing.assert_close(model(words, labels=words).loss, nll.mean())
    torch.testing.assert_close(model(words, labels=words, num_items_in_batch=5).loss, nll.sum() / 5)
    model.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(words).logits, log_prob)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "sqrtlm_tree"
    with pytest.raises(ValueError, match="another tree"):
        model.resize_token_embeddings(70)


@pytest.mark.parametrize("lacking", ["lm_head", "lm_head.weight", "lm_head.bias"])
def test_what_a_folder_lacks_of_the_layer_is_drawn(lacking: str, tmp_path: Path) -> None:
    """And what it has is kept."""
    model, words = model_of(tie_word_embeddings=False), torch.randint(60, (3, 9))
    torch.nn.init.ones_(model.lm_head.bias)
    state = model.state_dict()
    saved = {name: value for name, value in state.items() if not name.startswith(lacking)}
    model.save_pretrained(tmp_path, state_dict=dict(saved))
    loaded = type(model).from_pretrained(tmp_path)
    found = loaded.state_dict()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    assert 0.2 < loaded.lm_head.weight.abs().max() <= 0.25  # 1/√H
    assert (loaded.lm_head.bias == float("lm_head.bias" in saved)).all()
    torch.testing.assert_close(loaded(words).logits.exp().sum(-1), torch.ones(3, 9))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_generated_words_are_those_of_the_probabilities_of_all_words(tied: bool, kind: str) -> None:
    """Greedily those of transformers' own loop, also after padding; random ones as often."""
    model = model_of(kind, tie_word_embeddings=tied)
    words, mask = torch.randint(4, 59, (3, 6)), torch.ones(3, 6, dtype=torch.int64)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    found = model.generate(words, **options)
    expected = model.generate(words, repetition_penalty=1.0, **options)  # all words each time
    assert torch.equal(found, expected)
    padded = words.masked_fill(mask == 0, 59)
    expected = model.generate(padded, pad_token_id=59, **options)
    for others in ({}, {"repetition_penalty": 1.0}):  # the mask follows from the padding
        inferred = model.generate(padded, pad_token_id=59, max_new_tokens=7, **others)
        assert torch.equal(inferred, expected)
    alone = model.generate(words[1:2, 4:], max_new_tokens=7, do_sample=False)
    assert torch.equal(alone[0, 2:], found[1, 6:][: alone.shape[1] - 2])
    drawn = model.generate(words[:1].expand(4000, -1), max_new_tokens=1, do_sample=True, top_k=0)
    share = torch.bincount(drawn[:, -1], minlength=60) / 4000
    p = model(words[:1]).logits[0, -1].exp()
    assert ((share - p).abs() < 5 * (p / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize(
    ("options", "num_words"),
    [({}, 50), ({"top_k": None}, 60), ({"top_k": 0, "min_p": 0}, 60), ({"top_k": 5}, 5)],
)
def test_words_are_drawn_from_as_many_as_transformers_draws_from(
    options: dict[str, int | None], num_words: int
) -> None:
    model, words = model_of(), torch.randint(4, 59, (1, 6)).expand(3000, -1)
    for others in ({}, {"repetition_penalty": 1.0}):
        drawn = model.generate(words, max_new_tokens=1, do_sample=True, **options, **others)
        assert len(drawn[:, -1].unique()) == num_words


def test_generation_ends_at_the_end_of_a_text() -> None:
    model, words = model_of(), torch.randint(4, 60, (5, 2))
    with torch.no_grad():
        model.lm_head.bias[TREE.row_of_word[3]] = 4.0  # eos_token_id
    found = model.generate(words, max_new_tokens=40, do_sample=True)
    for row in found[:, 2:].tolist():
        end = row.index(3) if 3 in row else len(row)
        assert set(row[end:]) <= {3}
    assert found.shape[1] < 42


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_temperature_or_top_p_of_0_is_greedy(name: str) -> None:
    model, words = model_of(), torch.randint(4, 60, (20, 3))
    options = {"max_new_tokens": 5, "top_k": 0, "min_p": 0.0}
    drawn = model.generate(words, do_sample=True, **{name: 0.0}, **options)
    assert torch.equal(drawn, model.generate(words, max_new_tokens=5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 9.0),
        ("no_repeat_ngram_size", 1),
        ("suppress_tokens", list(range(40))),
        ("begin_suppress_tokens", list(range(40))),
        ("min_new_tokens", 30),
        ("num_beams", 5),
        ("max_time", 0),
    ],
)
def test_settings_of_a_model_do_what_arguments_do(name: str, value: Any) -> None:
    model, words = model_of(), torch.randint(4, 60, (6, 3))
    with torch.no_grad():
        model.lm_head.bias[TREE.row_of_word[3]] = 0.5  # eos_token_id
    expected = model.generate(words, max_new_tokens=30, **{name: value})
    assert not torch.equal(model.generate(words, max_new_tokens=30), expected)
    setattr(model.generation_config, name, value)
    assert torch.equal(model.generate(words, max_new_tokens=30), expected)


def test_settings_that_change_nothing_open_few_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = model_of(), torch.randint(4, 60, (6, 3))
    expected = model.generate(words)
    vars(model.generation_config).update(num_beams=1, repetition_penalty=1.0, bos_token_id=2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for each in (model, loaded):
        monkeypatch.setattr(each.lm_head, "log_prob", None)  # of all words
        assert torch.equal(each.generate(words), expected)


@pytest.mark.parametrize(
    "options", [{}, {"max_length": 40}, {"max_length": 40, "max_new_tokens": 7}]
)
def test_lengths_are_those_of_transformers(options: dict[str, int]) -> None:
    model, words = model_of(), torch.randint(4, 60, (2, 30))
    found = model.generate(words, eos_token_id=59, **options)
    expected = model.generate(words, eos_token_id=59, repetition_penalty=1.0, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{"max_length": 30}, {"max_length": 9}, {"max_new_tokens": 0}])
@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.0}])
def test_a_prompt_without_space_for_a_word_is_refused(
    options: dict[str, int], others: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="max_"):
        model_of().generate(torch.randint(4, 60, (2, 30)), **options, **others)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_decoder_has_beams_checkpoints_and_input_vectors(kind: str) -> None:
    """Beams for all words find the most probable pair of words."""
    model, words = model_of(kind, tie_word_embeddings=False), torch.randint(4, 60, (1, 5))
    options = {"max_new_tokens": 2, "num_beams": 60, "eos_token_id": None}
    pairs = torch.cartesian_prod(torch.arange(60), torch.arange(60))
    log_prob = model(torch.cat([words.expand(3600, -1), pairs], 1)).logits[:, 4:6]
    best = log_prob.gather(2, pairs[..., None]).sum((1, 2)).argmax()
    assert torch.equal(model.generate(words, **options)[0, 5:], pairs[best])

    expected = model(words, labels=words).loss
    expected.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable()
    loss = model.train()(words, labels=words).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient)

    table = torch.nn.Embedding(60, 16)
    assert model.get_input_embeddings().weight.shape == table.weight.shape
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table
    assert not torch.equal(model(words, labels=words).loss, expected)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        model_of(kind).set_input_embeddings(table)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tuple_has_what_the_output_has(kind: str) -> None:
    model, words = model_of(kind), torch.randint(60, (3, 9))
    options = {"output_hidden_states": True, "output_attentions": True}
    output, found = model(words, **options), model(words, return_dict=False, **options)
    assert len(found) == len(output)
    assert torch.equal(found[0], output.logits)
    torch.testing.assert_close(found[2], output.hidden_states)  # after the cache
    model.config.return_dict = False
    assert torch.equal(model(words)[0], output.logits)
    loss = model(words, labels=words, return_dict=True).loss
    assert torch.equal(model(words, labels=words)[0], loss)


def test_a_trainer_continues_bit_for_bit_and_trains_rows_as_dense_tables(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in torch.randint(30, (32, 9))]
    results = []
    for row_wise, resumed in ((False, None), (True, None), (True, str(tmp_path / "checkpoint-4"))):
        torch.manual_seed(0)
        model = model_of(row_wise=row_wise)
        settings: dict[str, Any] = {"max_steps": 8, "save_steps": 4, "report_to": []}
        settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, **settings)
        optimizers = (RowAdagrad(model.parameters(), lr=0.1), None)
        trainer = Trainer(model, args, train_dataset=data, optimizers=optimizers)
        before = trainer.evaluate(data)["eval_loss"]
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.evaluate(data)["eval_loss"] < before - 0.1
        results.append(model.state_dict())
    dense, expected, found = results
    torch.testing.assert_close(expected, dense)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
