"""Between two tokenizers: which tokens stand for the same characters, and a text of the one in the tokens of the other.

Nothing in here has to be right for outputs to be: a text that is read wrongly makes for drafts that are not accepted.
"""

import json
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

TAIL = 64  # target tokens that are read anew each round: the end of a text may be cut otherwise when it goes on
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


class Vocabulary:
    """A tokenizer's tokens as the bytes that they stand for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        byte_level = _is_byte_level(tokenizer)
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.surfaces = [
            None if number in self.special or piece is None else _surface(piece, byte_level)
            for number, piece in enumerate(pieces)
        ]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        return ids

    def spell(self, ids: list[int]) -> str:
        """The characters; bytes of one that is not whole are left out at the end."""
        spelled = b"".join(self.surfaces[number] or b"" for number in ids if number < len(self.surfaces))
        return spelled.decode("utf-8", errors="ignore")


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    kinds = [decoder["type"], *(each["type"] for each in decoder.get("decoders", []))]
    return "ByteLevel" in kinds


def _surface(piece: str, byte_level: bool) -> bytes:
    if byte_level:
        return bytes(BYTES[character] for character in piece) if all(c in BYTES for c in piece) else piece.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's way to say a byte
        return bytes.fromhex(piece[3:5])
    return piece.replace("\u2581", " ").encode()


class Translation:
    """Of a target's tokens and a draft's. Special tokens are one if they are written alike; so are the two that end a text."""

    def __init__(self, target_tokenizer: Any, draft_tokenizer: Any, draft_size: int) -> None:
        self.target, self.draft = Vocabulary(target_tokenizer), Vocabulary(draft_tokenizer)
        by_surface: dict[bytes | str, int] = {}
        for number, surface in enumerate(self.draft.surfaces[:draft_size]):
            name = self.draft.special.get(number, surface)
            if name:
                by_surface.setdefault(name, number)
        self.to_draft: dict[int, int] = {}
        taken: set[int] = set()
        for number, surface in enumerate(self.target.surfaces):
            found = by_surface.get(self.target.special.get(number, surface) or "")
            if found is not None and found not in taken:
                self.to_draft[number] = found
                taken.add(found)
        self.num_shared = sum(number not in self.target.special for number in self.to_draft)
        ends = target_tokenizer.eos_token_id, draft_tokenizer.eos_token_id
        if None not in ends and ends[0] not in self.to_draft and ends[1] not in taken:
            self.to_draft[ends[0]] = ends[1]
        self.to_target = {drafted: number for number, drafted in self.to_draft.items()}
        self.begin: list[int] = list(draft_tokenizer("")["input_ids"])  # what this tokenizer puts before every text

    def shared(self, target_size: int) -> tuple[Tensor, Tensor]:
        """Ids of the tokens that both have, the draft's and the target's, (S,) each."""
        pairs = [(drafted, number) for number, drafted in self.to_draft.items() if number < target_size]
        both = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def into_draft(self, ids: list[int]) -> list[int]:
        """A text of the target in the draft's tokens, as its tokenizer would cut it. Special tokens one by one."""
        made: list[int] = []
        run: list[int] = []
        for number in ids:
            if number not in self.target.special:
                run.append(number)
                continue
            made += self.draft.encode(self.target.spell(run))
            run = []
            found = self.to_draft.get(number)
            made += [found] if found is not None else self.draft.encode(self.target.special[number])
        return made + self.draft.encode(self.target.spell(run))

    def continuation(self, text: list[int], drafted: list[int]) -> list[int]:
        """Drafted tokens in the target's, behind its text. Ends with the first special token, which is taken if it has one."""
        special = next((number for number, token in enumerate(drafted) if token in self.draft.special), len(drafted))
        said = self.draft.spell(drafted[:special])
        # Behind the last word, since a tokenizer may cut a word that goes on otherwise; only where it cuts the text as it is.
        tail = text[-TAIL:]
        begins = next((i for i in range(len(tail) - 1, -1, -1) if self.begins_word(tail[i])), len(tail))
        word = tail[begins:]
        made = self.target.encode(self.target.spell(word) + said)
        made = made[len(word) :] if made[: len(word)] == word else self.target.encode(said)
        if special < len(drafted) and drafted[special] in self.to_target:
            made.append(self.to_target[drafted[special]])
        return made

    def begins_word(self, token: int) -> bool:
        surface = self.target.surfaces[token] if token < len(self.target.surfaces) else None
        return surface is not None and surface[:1].isspace()


class Reading:
    """One text as it grows, in the draft's tokens. What lies more than TAIL tokens back is not read again."""

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.num_settled = 0  # target tokens
        self.settled: list[int] = []  # the same in the draft's

    def read(self, ids: list[int]) -> list[int]:
        begin = self.translation.begin
        if not self.num_settled and not self.settled and [self.translation.to_draft.get(ids[0])] != begin[:1]:
            self.settled = list(begin)
        tail = ids[self.num_settled :]
        if len(tail) > 2 * TAIL:
            far = len(tail) - TAIL
            # Settled up to a word, so that no word is cut in two.
            words = [i for i in range(far // 2, far + 1) if self.translation.begins_word(tail[i])]
            far = words[-1] if words else far
            self.settled += self.translation.into_draft(tail[:far])
            self.num_settled += far
            tail = tail[far:]
        return self.settled + self.translation.into_draft(tail)
