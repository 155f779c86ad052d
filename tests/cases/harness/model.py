"""A small model's tokenizer and template, with tools and thinking, and a context of 4096 tokens."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
"""
_WORDS = (
    "the answer call name arguments time zone city path folder river apples cheese chess night train red blue short "
    "hot tea"
)


def make_folder(folder: Path) -> None:
    """Tokenizer files and config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng, words = random.Random(0), _WORDS.split()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(200)]
    tokenizer.train_from_iterator([*lines, *["Yes"] * 50, *["red"] * 50], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": CONTEXT}))


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer

    @classmethod
    def of(cls, folder: Path) -> "Vocabulary":
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """Encode each piece alone and join the ids; `<eos>` is the end of a turn."""
        found: list[int] = []
        for piece in pieces:
            found += self.tokenizer.encode("<|im_end|>" if piece == "<eos>" else piece, add_special_tokens=False).ids
        return found

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def controls(self, ids: Sequence[int]) -> int:
        """Return the number of control tokens among the ids."""
        known = {self.tokenizer.token_to_id(text) for text in (*SPECIAL, *MARKS)}
        return sum(token in known for token in ids)
