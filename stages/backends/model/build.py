"""Loads or builds a model and its tokenizer. Knows Hugging Face, not what the model is used for.

    model = Model("Qwen/Qwen3-0.6B")
    tokenizer = load_tokenizer(model)
    network = load_network(model, tokenizer, dtype=torch.bfloat16, device=torch.device("cuda"))

A `Model` with a `config` is initialized at random from its seed, with one token per character of its alphabet, or one
token per UTF-8 byte if the alphabet is the word "bytes", which covers every text. Two config keys are ours:
`embedding_std` redraws the embedding with this standard deviation, and `vocab_size` is optional. AutoModelForCausalLM
and AutoTokenizer load the folder that `save` writes.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from pipeline import Model, StageError
from pipeline.errors import Problem, message_of
from stages.backends.model.precision import kept_dtype
from stages.images import is_seeing
from stages.model_files import refuse_code
from stages.model_weights import first_of, refuse_weights

PAD, EOS = "<pad>", "<eos>"
BYTES = "bytes"  # as an alphabet
START, IMAGE, END, VIDEO = SEEING_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its chat template. Raises StageError if the source cannot be loaded."""
    made = _tokenizer(model)
    if model.chat_template is not None:
        made.chat_template = model.chat_template
    return made


def _tokenizer(model: Model) -> PreTrainedTokenizerBase:
    if model.config is not None:
        made = byte_tokenizer() if model.alphabet == BYTES else character_tokenizer(model.alphabet or "")
        if is_seeing(model.config):
            made.add_special_tokens({"additional_special_tokens": list(SEEING_TOKENS)})
        return made
    refuse_code(model)
    try:
        return AutoTokenizer.from_pretrained(model.source, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # whatever is in the folder
        raise StageError(not_loaded(model, error)) from error


def load_network(
    model: Model, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The network in eval mode, warm start applied. Deterministic in the model and its seed.

    Raises StageError if the source cannot be loaded, or lacks a weight.
    """
    network: Any
    first = dtype if model.warm_start is None else torch.float32  # small updates vanish in bfloat16
    if model.config is not None:
        network = build(model, tokenizer)
    else:
        refuse_code(model)
        try:
            config = AutoConfig.from_pretrained(model.source, trust_remote_code=model.trust_remote_code)
            chosen = auto_class(is_seeing(config.to_dict()))
            disable_progress_bar()  # it would break the line about the run, which also loads weights in a first task
            network, found = chosen.from_pretrained(
                model.source, config=plain(config), dtype=first, output_loading_info=True, **trust(model)
            )
        except Exception as error:  # whatever is in the folder
            raise StageError(not_loaded(model, error)) from error
        refuse_loaded(model)
        if lacking := sorted(found["missing_keys"]):  # those that are tied are none of them
            raise StageError(_incomplete(model, lacking))
    network = convert(network, first, device).eval()
    if model.warm_start is not None:
        model.warm_start.run(network, tokenizer, model.seed)
    return convert(network, dtype, device)


def refuse_loaded(model: Model) -> None:
    """Raise StageError if the weights that transformers loaded cannot be those of the model's config."""
    refuse_weights(model, Path(str(cached_file(model.source, "config.json"))).parent)


def auto_class(seeing: bool) -> Any:
    """The class of transformers that loads a model that sees images, or only reads."""
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


def plain(config: Any) -> Any:
    """The config with which transformers multiplies 8-bit floats by their scales when it loads them, also on a GPU: a
    conversion of the loaded network would convert them without."""
    how = getattr(config, "quantization_config", None)
    if isinstance(how, dict) and how.get("quant_method") == "fp8":
        how["dequantize"] = True
    return config


def convert(network: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The network on a device and in a dtype, but for tensors that keep their own."""
    kept = {name: tensor for name, tensor in network.named_buffers() if kept_dtype(name)}
    network = network.to(device=device, dtype=dtype)
    for name, tensor in kept.items():
        network.get_buffer(name).data = tensor.to(device)
    return network


def trust(model: Model) -> dict[str, Any]:
    """The arguments of `from_pretrained` for weights: no pickle and no code of the model's own, unless it is trusted.
    Transformers reads a trusted pickle as tensors only."""
    return {"trust_remote_code": model.trust_remote_code, "use_safetensors": None if model.trust_remote_code else True}


def save(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer."""
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character; ids 0 and 1 are padding and end of sequence. Unknown characters raise."""
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, *alphabet))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte; ids 0 and 1 are padding and end of sequence. Invalid UTF-8 decodes to U+FFFD."""
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def closing_tokens(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response, from the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for ids in (
        network.generation_config.eos_token_id if network.generation_config else None,
        network.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))


def not_loaded(model: Model, error: Exception, kind: str = "causal language model") -> Problem:
    """The problem for a source that is not a Hugging Face model of this kind."""
    return Problem(
        where=str(model.location),
        what=f"model {model.source!r} cannot be loaded: {message_of(error)}",
        why=f"it must be a folder or hub name of a Hugging Face {kind}",
        fix="a folder written by save_pretrained, or a name that this machine can download",
    )


def _incomplete(model: Model, lacking: list[str]) -> Problem:
    return Problem(
        where=str(model.location),
        what=f"the model {model.source!r} has no weights {first_of(lacking)}",
        why="its config.json asks for them, and transformers would draw them at random",
        fix="save or download the model again",
    )


def _not_built(model: Model, error: Exception) -> Problem:
    kind = (model.config or {}).get("model_type")
    what, fix = f"model {model.source!r} cannot be built: {message_of(error)}", "correct the values of its config"
    if kind not in CONFIG_MAPPING_NAMES:
        near = get_close_matches(str(kind), CONFIG_MAPPING_NAMES, n=1)
        what = f"the config of model {model.source!r} has model_type={kind!r}, which transformers does not know"
        fix = f"did you mean {near[0]!r}?" if near else "model_type='qwen3'"
    why = "the config is that of a Hugging Face causal language model"
    return Problem(where=str(model.location), what=what, why=why, fix=fix)


def build(model: Model, tokenizer: PreTrainedTokenizerBase, auto: Any = None, **settings: Any) -> PreTrainedModel:
    """The randomly initialized network of a model with a config. `auto` selects the head, `settings` go into the
    config. Raises StageError if the config has no room for the alphabet."""
    embedding_std = (model.config or {}).get("embedding_std")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        try:  # the config is the user's
            auto = auto or auto_class(is_seeing(model.config or {}))
            network = auto.from_config(built_config(model, tokenizer, **settings), dtype=torch.float32)
        except StageError:
            raise
        except Exception as error:
            raise StageError(_not_built(model, error)) from error
        if embedding_std is not None:
            torch.nn.init.normal_(network.get_input_embeddings().weight, std=embedding_std)
    return network


def built_config(model: Model, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Any:
    """The Hugging Face config of a model with a config, completed by what its tokenizer says. Of a model that sees
    images, vocabulary and ids of a text are those of its `text_config`. Raises StageError if there is no room for the
    alphabet."""
    config = {name: value for name, value in (model.config or {}).items() if name != "embedding_std"} | settings
    seeing = is_seeing(config)
    text = dict(config.get("text_config") or {}) if seeing else config
    text.setdefault("vocab_size", len(tokenizer))
    if text["vocab_size"] < len(tokenizer):
        raise StageError(
            Problem(
                where=str(model.location),
                what=f"vocab_size is {text['vocab_size']} and the alphabet needs {len(tokenizer)} tokens",
                why="each character, padding and end of sequence need a row in the embedding",
                fix="omit vocab_size, or make it larger",
            )
        )
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text |= ids
    if seeing:
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
        own = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, SEEING_TOKENS)}
        config |= ids | own | {"text_config": text}
    return AutoConfig.for_model(config.pop("model_type"), **config)
