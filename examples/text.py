"""Text to tokens: a byte-level BPE tokenizer trained on the text itself, both cached on disk."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_FILE = "<|end|>"
MIN_VOCAB_SIZE = 257  # the bytes and END_OF_FILE


class TextError(Exception):
    """The text cannot be used; the message says why."""


def read_text(path: Path | None) -> list[str]:
    """The texts of a file or of all files below a folder; by default the sources of Python's standard library."""
    if path is None:
        return _read_files(_standard_library())
    if not path.exists():
        raise TextError(f"no such file or folder: {path}")
    if path.is_dir():
        texts = _read_files(file for file in sorted(path.rglob("*")) if file.is_file())
    else:
        texts = _read_files([path], skip_unreadable=False)
    if not any(texts):
        raise TextError(f"there is no text in {path}")
    return texts


def tokenize(texts: list[str], vocab_size: int, cache: Path) -> Path:
    """Train a tokenizer on the texts, encode them, and return the file that holds the tokens as an int32 array."""
    folder = cache / f"text-{_digest(texts)}-{vocab_size}"
    file = folder / "tokens.npy"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = _train_tokenizer(texts, vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"))
        end = tokenizer.token_to_id(END_OF_FILE)
        tokens = [token for encoding in tokenizer.encode_batch(texts) for token in [*encoding.ids, end]]
        unfinished = folder / f"tokens-{os.getpid()}.npy"
        np.save(unfinished, np.array(tokens, dtype=np.int32))
        unfinished.replace(file)  # in one step: an interrupted run leaves no half of a cache
    return file


class Batches:
    """Batch `step` is drawn from the seed and the step alone, so that a resumed run sees what it would have seen."""

    def __init__(self, file: Path, batch_size: int, seq_len: int, seed: int) -> None:
        self.tokens = torch.from_numpy(np.load(file))
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The tokens and their successors, `[batch_size, seq_len]` each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - self.seq_len, (self.batch_size, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(self.seq_len + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def count_tokens(file: Path) -> int:
    return len(np.load(file, mmap_mode="r"))


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return [file for file in sorted(root.rglob("*.py")) if skipped.isdisjoint(file.relative_to(root).parts)]


def _read_files(files: Iterable[Path], skip_unreadable: bool = True) -> list[str]:
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            if not skip_unreadable:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise TextError(f"cannot read {file}: {reason}") from error
    return texts


def _digest(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
