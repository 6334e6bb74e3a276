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


def model_of(**settings: Any) -> Any:
    """A small Llama with the tree as its head."""
    transformers = pytest.importorskip("transformers")
    from lm.output.hf import TreeConfig, TreeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    backbone = transformers.LlamaConfig(num_attention_heads=2, eos_token_id=3, **sizes)
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


@pytest.mark.parametrize("tied", [True, False])
def test_generated_words_are_those_of_the_probabilities_of_all_words(tied: bool) -> None:
    """Greedily those of transformers' own loop, also after padding; random ones as often."""
    model = model_of(tie_word_embeddings=tied)
    words, mask = torch.randint(4, 60, (3, 6)), torch.ones(3, 6, dtype=torch.int64)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    found = model.generate(words, **options)
    expected = model.generate(words, repetition_penalty=1.0, **options)  # all words each time
    assert torch.equal(found, expected)
    alone = model.generate(words[1:2, 4:], max_new_tokens=7, do_sample=False)
    assert torch.equal(alone[0, 2:], found[1, 6:][: alone.shape[1] - 2])
    drawn = model.generate(words[:1].expand(4000, -1), max_new_tokens=1, do_sample=True, top_k=0)
    share = torch.bincount(drawn[:, -1], minlength=60) / 4000
    p = model(words[:1]).logits[0, -1].exp()
    assert ((share - p).abs() < 5 * (p / 4000).sqrt() + 1e-3).all()


def test_generation_ends_at_the_end_of_a_text() -> None:
    model, words = model_of(), torch.randint(4, 60, (5, 2))
    with torch.no_grad():
        model.lm_head.bias[TREE.row_of_word[3]] = 4.0  # eos_token_id
    found = model.generate(words, max_new_tokens=40, do_sample=True)
    for row in found[:, 2:].tolist():
        end = row.index(3) if 3 in row else len(row)
        assert set(row[end:]) <= {3}
    assert found.shape[1] < 42


def test_row_wise_training_changes_visited_rows_as_dense_training_does() -> None:
    words, found = torch.randint(30, (4, 8)), []
    for row_wise in (False, True):
        torch.manual_seed(0)
        model = model_of(row_wise=row_wise).train()
        optimizer = RowAdagrad(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(words, labels=words).loss.backward()
            optimizer.step()
        found.append(model.lm_head.weight.detach())
    torch.testing.assert_close(*found)
