"""Text to token ids and back, through the `tokenizers` library: from a tokenizer.json, or a GGUF file's own vocabulary."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from infreal.model.errors import ModelError, one_line

CONTROL, USER_DEFINED = 3, 4  # token types of a GGUF file that are matched whole in the text


@dataclass(frozen=True)
class Tokenizer:
    """`stop_ids`: tokens at which a text ends; `bos_id`: put in front of a prompt where not None."""

    library: tokenizers.Tokenizer
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """Raises ModelError for a text with bytes that the vocabulary does not have, or that are no text at all."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            found = f"{text[error.start]!a} at character {error.start}"
            raise ModelError(f"prompt: {found} is not Unicode text (allowed: UTF-8)") from error
        unknown = next((byte for byte in raw if byte in self.missing_bytes), None)
        if unknown is not None:
            raise ModelError(f"prompt: byte 0x{unknown:02x} is not in the model's vocabulary")
        encoded = self.library.encode(text)
        self._check_known(text, encoded)
        front = [] if self.bos_id is None else [self.bos_id]
        return front + encoded.ids

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Byte-level vocabularies drop a byte that they lack in silence."""
        if _decoder_kind(self.library) != "ByteLevel":
            return frozenset()
        return frozenset(byte for byte, char in byte_characters().items() if self.library.token_to_id(char) is None)

    @cached_property
    def unknown_token(self) -> str | None:
        """What stands for all that a vocabulary without bytes does not have."""
        return json.loads(self.library.to_str())["model"].get("unk_token")

    def _check_known(self, text: str, encoded: tokenizers.Encoding) -> None:
        """Every character (white space may be folded) must have become a token other than the unknown one."""
        spans = zip(encoded.tokens, encoded.offsets, strict=True)
        known = {i for token, (start, end) in spans if token != self.unknown_token for i in range(start, end)}
        for i, character in enumerate(text):
            if i not in known and not character.isspace():
                raise ModelError(f"prompt: {character!r} at character {i} is not in the model's vocabulary")

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.library.decode(list(token_ids))

    def stream(self, token_ids: Iterable[int]) -> Iterator[str]:
        """Text as soon as it is whole: a character may span several tokens. The last piece may be incomplete UTF-8."""
        stream = DecodeStream(skip_special_tokens=True)
        pending: list[int] = []
        for token_id in token_ids:
            pending.append(token_id)
            piece = stream.step(self.library, token_id)
            if piece is not None:
                pending.clear()
                yield piece
        if pending:
            yield self.decode(pending)


def load_tokenizer(file: Path, stop_ids: tuple[int, ...]) -> Tokenizer:
    """A tokenizer.json. Raises ModelError where it is absent or broken."""
    if not file.exists():
        raise ModelError(f"{file}: not there; text needs it (token ids do not)")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(file)), stop_ids)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file}: not a tokenizer.json ({one_line(error)})") from error


@dataclass(frozen=True)
class GgufVocabulary:
    """The `tokenizer.ggml.*` fields. `adds_bos` None: as the pre-tokenizer's family does."""

    kind: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_id: int | None
    adds_bos: bool | None
    stop_ids: tuple[int, ...]


def tokenizer_from_gguf(vocabulary: GgufVocabulary, where: str) -> Tokenizer:
    """A byte-level BPE (GGUF calls it gpt2). Raises ModelError for another kind, or an unknown way to split words."""
    if vocabulary.kind != "gpt2":
        raise ModelError(
            f"{where}: tokenizer.ggml.model: {vocabulary.kind!r} (allowed: gpt2, or a tokenizer.json beside the file)"
        )
    if vocabulary.pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{where}: tokenizer.ggml.pre: {vocabulary.pre!r} (allowed: {known}, or a tokenizer.json)")
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    try:
        library = tokenizers.Tokenizer(models.BPE(ids, merges))
    except Exception as error:
        raise ModelError(f"{where}: tokenizer.ggml.merges do not fit the tokens ({one_line(error)})") from error
    words, adds_bos = PRE_TOKENIZERS[vocabulary.pre]
    library.pre_tokenizer, library.decoder = pre_tokenizers.Sequence(words), decoders.ByteLevel()
    _add_special(library, vocabulary)
    adds_bos = adds_bos if vocabulary.adds_bos is None else vocabulary.adds_bos
    return Tokenizer(library, vocabulary.stop_ids, vocabulary.bos_id if adds_bos else None)


def _add_special(library: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    pairs = list(zip(vocabulary.tokens, vocabulary.token_types, strict=False))
    library.add_special_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == CONTROL])
    library.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED])


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# How text is cut into words before BPE, and whether a prompt begins with BOS: the tokenizer.json of each family.
GPT2 = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
SMOLLM = [pre_tokenizers.Digits(individual_digits=True), *GPT2]
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "default": (GPT2, False),
    "gpt-2": (GPT2, False),
    "smollm": (SMOLLM, False),
    "qwen2": (_split(_WORDS % ""), False),
    "llama-bpe": (_split(_WORDS % "{1,3}"), True),
}


def _decoder_kind(library: tokenizers.Tokenizer) -> str | None:
    decoder = json.loads(library.to_str())["decoder"]
    return None if decoder is None else decoder["type"]


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where it is printable Latin-1, else the next free one above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
