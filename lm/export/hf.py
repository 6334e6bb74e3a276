"""A run's Transformer as a model of Hugging Face's transformers, `lm.output.hf.TreeForCausalLM`.

It is a Mistral decoder: RMSNorm, rotary positions, SwiGLU, and attention to the last `context`
positions. Input vectors that sum paths or pieces become a table of one vector a word.
"""

import importlib
from pathlib import Path
from shutil import copymode

import torch
from torch import Tensor

from data_prep.errors import UserError
from lm.model.build import without_weights
from lm.model.transformer import NORM_EPS, ROTARY_BASE, Transformer
from lm.output import HierarchicalSoftmax
from lm.run import TrainedRun


def check_hf(run: TrainedRun) -> None:
    """Raises UserError if transformers is missing, or the model is no Transformer with a tree."""
    try:
        importlib.import_module("lm.output.hf")
    except ImportError as error:
        raise UserError(
            f"--hf requires transformers 5: pip install transformers ({error})"
        ) from error
    is_tree = isinstance(run.model.output, HierarchicalSoftmax)
    if not isinstance(run.model.backbone, Transformer) or not is_tree:
        raise UserError(f"{run.folder}: --hf requires model.backbone: transformer, and a tree")


@torch.no_grad()
def write_hf(run: TrainedRun, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` of transformers to a folder, after `check_hf`."""
    from transformers import MistralConfig

    from lm.output.hf import TreeConfig, TreeForCausalLM

    model, backbone = run.model, run.model.backbone
    assert isinstance(backbone, Transformer)
    inner = backbone.get_parameter("blocks.0.feedforward.down.weight").shape[1]
    config = MistralConfig(
        vocab_size=model.vocab_size,
        hidden_size=backbone.hidden_size,
        intermediate_size=inner,
        num_hidden_layers=len(backbone.blocks),
        num_attention_heads=backbone.heads,
        num_key_value_heads=backbone.heads,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        sliding_window=backbone.context,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
        bos_token_id=run.description.eos_id,
        eos_token_id=run.description.eos_id,
        pad_token_id=run.description.eos_id,
    )
    settings = {"tie_word_embeddings": False, "bos_token_id": run.description.eos_id}
    with without_weights():
        written = TreeForCausalLM(TreeConfig.of(config, model.tree_softmax.tree, **settings))
    written.load_state_dict(_state(run), strict=True, assign=True)
    written.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        copymode(folder / "config.json", path)  # which others could not read


def _state(run: TrainedRun) -> dict[str, Tensor]:
    """The parameters by their names in transformers."""
    model, backbone = run.model, run.model.backbone
    assert isinstance(backbone, Transformer)
    state = {f"lm_head.{name}": value for name, value in model.tree_softmax.state_dict().items()}
    vectors = torch.empty(model.vocab_size, backbone.hidden_size, device=model.device)
    for words in torch.split(torch.arange(model.vocab_size, device=model.device), 4096):
        vectors[words] = backbone.project(model.embed(words))
    state["model.embed_tokens.weight"] = vectors
    state["model.norm.weight"] = backbone.norm.weight
    for k, block in enumerate(backbone.blocks):
        own, to = block.get_parameter, f"model.layers.{k}."
        split = own("attention.query_key_value.weight").chunk(3)
        for name, value in zip("qkv", split, strict=True):
            state[f"{to}self_attn.{name}_proj.weight"] = value
        state[f"{to}self_attn.o_proj.weight"] = own("attention.out.weight")
        gate_up = own("feedforward.gate_up.weight").chunk(2)
        for name, value in zip(("gate", "up"), gate_up, strict=True):
            state[f"{to}mlp.{name}_proj.weight"] = value
        state[f"{to}mlp.down_proj.weight"] = own("feedforward.down.weight")
        state[f"{to}input_layernorm.weight"] = own("attention_norm.weight")
        state[f"{to}post_attention_layernorm.weight"] = own("feedforward_norm.weight")
    return {n: v.float() if v.is_floating_point() else v for n, v in state.items()}
