"""Train the demo model's byte-level BPE tokenizer (1024 entries) on text of the demo language.

Digits are separate tokens, so that arithmetic sees places; a beginning-of-sequence token is put in front of every
text by the tokenizer's own post-processor.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from language import document_of_kind, draw_kind, split_marks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
VOCAB_SIZE = 1024
NUM_DOCUMENTS = 20_000


def train_tokenizer(seed: str = "tokenizer", num_documents: int = NUM_DOCUMENTS) -> PreTrainedTokenizerFast:
    """A tokenizer fitted to `num_documents` documents of the language; deterministic for a seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(seed)
    texts = (split_marks(document_of_kind(draw_kind(rng), rng))[0] for _ in range(num_documents))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Write the tokenizer files into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    train_tokenizer().save_pretrained(parser.parse_args().folder)


if __name__ == "__main__":
    main()
