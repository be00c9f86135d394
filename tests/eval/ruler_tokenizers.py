"""Tokenizers for the tests of the RULER tasks: learnt from the tasks' own words, offline."""

from __future__ import annotations

from functools import cache
from random import Random

from rigged_models import BOS, BOS_TEMPLATE, EOS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.eval.haystack import NOISE, Prose
from nanovllm.eval.ruler.words import all_words


@cache
def word_tokenizer(
    *, adds_bos: bool = True, chat_template: str | None = None, prefix_space: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with some merges.

    Args:
        adds_bos: whether it puts `<s>` before a text.
        chat_template: its template.
        prefix_space: whether it puts a space before a text, so that pieces of a text take more
            tokens alone than within it.
    """
    corpus = [*Prose(0).excerpt(Random(0), 400), *NOISE, *(f" {word}" for word in all_words())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[EOS, BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 1)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = chat_template
    return fast


PLAIN = {"adds_bos": True}
CHAT = {"adds_bos": True, "chat_template": BOS_TEMPLATE}
