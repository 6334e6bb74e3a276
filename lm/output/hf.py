"""The layer as the output of a decoder of Hugging Face's transformers.

    from transformers import AutoModelForCausalLM, LlamaConfig
    from lm.output.hf import TreeConfig, TreeForCausalLM

    model = TreeForCausalLM(TreeConfig.of(LlamaConfig(...), tree))
    model(words, labels=words).loss.backward()
    model.generate(words, max_new_tokens=20, do_sample=True, top_p=0.9)
    model.save_pretrained("folder")
    AutoModelForCausalLM.from_pretrained("folder")  # where this module is imported

The model type is `sqrtlm_tree`, so that no other class loads such a folder as a model of its own.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from lm.output.layer import HierarchicalSoftmax
from lm.output.tree.class_tree import DEFINING, ClassTree

_DRAWN = ("temperature", "top_k", "top_p", "min_p")
_KNOWN = {
    *("do_sample", "max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "use_cache"),
    *("attention_mask", *_DRAWN),
    *("bos_token_id", "transformers_version", "_from_model_config"),  # without effect here
}


class TreeConfig(PreTrainedConfig):
    """A decoder's configuration, and the tree of the softmaxes over its words.

    Args:
        backbone: `to_dict()` of the decoder's configuration.
        tree: the three arrays that define a `ClassTree`, as lists.
        row_wise: whether gradients of the layer, and of input vectors that it shares, have visited
            rows only, for the optimizers of `lm.output.rowwise`.
        tie_word_embeddings: whether the layer's rows are the words' input vectors.
        others: settings of any `PreTrainedConfig`.
    """

    model_type = "sqrtlm_tree"

    def __init__(
        self,
        backbone: dict[str, Any] | None = None,
        tree: dict[str, list[int]] | None = None,
        row_wise: bool = False,
        tie_word_embeddings: bool = True,
        **others: Any,
    ) -> None:
        self.backbone, self.tree, self.row_wise = backbone, tree, row_wise
        decoder = AutoConfig.for_model(**backbone) if backbone else None
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            others.setdefault(name, getattr(decoder, name, None))  # also n_layer
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @classmethod
    def of(cls, backbone: PreTrainedConfig, tree: ClassTree, **settings: Any) -> "TreeConfig":
        """The configuration of a decoder with the words of a tree; settings as of the class."""
        arrays = {name: getattr(tree.arrays, name).tolist() for name in DEFINING}
        values = backbone.to_dict() | {"vocab_size": tree.vocab_size}
        known = {name: getattr(backbone, name) for name in ("eos_token_id", "pad_token_id")}
        return cls(values, arrays, **(known | settings))


class TreeForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder whose output layer is a `HierarchicalSoftmax`."""

    config_class = TreeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_cache_class = True
    _no_split_modules: ClassVar[list[str]] = []

    def __init__(self, config: TreeConfig) -> None:
        super().__init__(config)
        values = dict(config.backbone or {})
        backbone = AutoConfig.for_model(values.pop("model_type"), **values)
        arrays = (torch.tensor((config.tree or {})[name], device="cpu") for name in DEFINING)
        tree = ClassTree(*arrays)
        self.model = AutoModel.from_config(backbone)
        size = backbone.hidden_size
        self.lm_head = HierarchicalSoftmax(size, tree, row_wise=config.row_wise)
        if config.tie_word_embeddings:
            self.model.set_input_embeddings(torch.nn.Identity())
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Draws what a folder lacks of the layer; the decoder initializes itself."""
        if isinstance(module, HierarchicalSoftmax):
            module.reset_parameters()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The module of the input vectors; the layer, if it shares them."""
        is_tied = self.config.tie_word_embeddings
        return self.lm_head if is_tied else self.model.get_input_embeddings()

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Replaces the module of the input vectors; refused, if it is the layer."""
        if self.config.tie_word_embeddings:
            raise ValueError("the layer has the input vectors: set tie_word_embeddings=False")
        self.model.set_input_embeddings(value)

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        """Refused: a word belongs to a class."""
        raise ValueError("the words are those of the tree: build a TreeConfig with another tree")

    def _hidden(self, input_ids: Tensor | None, options: dict[str, Any]) -> Any:
        if self.config.tie_word_embeddings and input_ids is not None:
            options["inputs_embeds"] = self.lm_head.embed(input_ids)
        else:
            options["input_ids"] = input_ids
        return self.model(**options | {"return_dict": True})

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        attention_mask: Tensor | None = None,  # `GenerationMixin` gives what is named here
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The mean loss of shifted labels, or else the log-probabilities of all words.

        A `CausalLMOutputWithPast`, or a tuple of what it has if `return_dict`, by default that of
        the configuration, is false.
        """
        options |= {"attention_mask": attention_mask, "position_ids": position_ids}
        found = self._hidden(input_ids, options)
        hidden, loss, logits = found.last_hidden_state, None, None
        if labels is None:
            logits = self.lm_head.log_prob(hidden[:, -logits_to_keep:])
        else:
            targets = labels[:, 1:]
            total = "mean" if num_items_in_batch is None else "sum"
            loss = self.lm_head.loss(hidden[:, :-1], targets, total)  # type: ignore[arg-type]
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        known = CausalLMOutputWithPast.__dataclass_fields__
        others = {name: value for name, value in found.items() if name in known}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **others)
        is_dict = self.config.return_dict if return_dict is None else return_dict
        return output if is_dict else output.to_tuple()

    def _changed_settings(self) -> set[str]:
        """Names of the settings of `generation_config` that differ from transformers' defaults."""
        config = self.generation_config
        defaults = config._get_default_generation_params()
        return {
            name
            for name, value in config.to_dict().items()
            if value is not None and value is not False and value != defaults.get(name)
        }

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, **options: Any) -> Any:
        """As `GenerationMixin.generate`; draws and the most probable word open few classes.

        Beams, penalties and other options of transformers compute the probabilities of all words.
        """
        words = options.pop("input_ids", None) if inputs is None else inputs
        given = {name for name, value in options.items() if value is not None}
        if words is None or not given | self._changed_settings() <= _KNOWN:
            return super().generate(words, **options)
        settings = self.generation_config.to_dict() | options
        if "top_k" not in options and settings["top_k"] is None:
            settings["top_k"] = self.generation_config._get_default_generation_params()["top_k"]
        length, num_new = settings["max_length"], settings["max_new_tokens"]
        if length is None or num_new is not None:
            length = words.shape[1] + (20 if num_new is None else num_new)
        if length <= words.shape[1]:
            size = f"the {words.shape[1]} words of the prompt"
            raise ValueError(f"max_length must be more than {size}, got {length}")
        ends, pad = (
            torch.as_tensor([] if settings[name] is None else settings[name]).to(words).flatten()
            for name in ("eos_token_id", "pad_token_id")
        )
        mask = settings.get("attention_mask")
        if mask is None:  # as transformers infers it
            mask = (~torch.isin(words, pad[~torch.isin(pad, ends)])).long()
        pad = pad if len(pad) else ends[:1]
        settings["top_k"] = settings["top_k"] or None
        sampling = {name: settings[name] for name in _DRAWN if settings[name] is not None}
        is_greedy = not settings["do_sample"] or settings["top_p"] == 0
        is_done = torch.zeros(len(words), dtype=torch.bool, device=words.device)
        new, cache = words, dict[str, Any]()
        while words.shape[1] < length and not bool(is_done.all()):
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            step = {"attention_mask": mask, "position_ids": position, "use_cache": True}
            found = self._hidden(new, step | cache)
            cache = {k: v for k, v in found.items() if k in ("cache", "past_key_values")}
            hidden = found.last_hidden_state[:, -1]
            if is_greedy:
                new = self.lm_head.predict(hidden)
            else:
                new = self.lm_head.sample(hidden, **sampling)
            if len(ends):
                new = torch.where(is_done, pad, new)
                is_done |= torch.isin(new, ends)
            new = new[:, None]
            words, mask = torch.cat([words, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        return words


AutoConfig.register(TreeConfig.model_type, TreeConfig)
AutoModelForCausalLM.register(TreeConfig, TreeForCausalLM)
