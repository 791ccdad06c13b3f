"""Prompt lookup: what followed the last tokens when they last stood in the text. No model, no weights.

Source of the idea: prompt lookup decoding (Saxena 2023), as in transformers' `prompt_lookup_num_tokens`. Here the longest
match wins, and among equals the most recent one; a match that runs into its own end goes on in a circle. A tree takes what
followed the latest few matches of each length, the longest first.
"""

from torch import Tensor

from specplug.drafters import Proposal, Request, TextSession
from specplug.fixed import to_device
from specplug.tree import Dynamic, Shape, Tree

REMEMBERED = 4  # occurrences of an n-gram that a tree may go back to


class LookupDrafter:
    """Args: shortest and longest run of tokens to look for."""

    name = "lookup"
    costs_nothing = True
    drafts_trees = True

    def __init__(self, min_ngram: int = 2, max_ngram: int = 8) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: need 1 <= min_ngram <= max_ngram")
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    def start(self, request: Request) -> "LookupSession":
        return LookupSession(self.sizes, request)


class LookupSession(TextSession):
    def __init__(self, sizes: range, request: Request) -> None:
        self.sizes, self.vocab_size, self.read = sizes, request.vocab_size, request.read
        self.text: list[int] = []
        self.indexed = 0  # n-grams that end before this position are in `following`
        # n-gram -> where its latest occurrences are followed up, the last of them first
        self.following: dict[tuple[int, ...], list[int]] = {}

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        self.text += self.read(ids, len(self.text))
        self._index()
        starts, matched = self._find(1)
        draft = self._after(starts[0], gamma) if starts else []
        return Proposal(to_device(draft, ids.device)[None], None, matched)

    def propose_tree(self, ids: Tensor, shape: Shape) -> Proposal:
        self.text += self.read(ids, len(self.text))
        self._index()
        starts, matched = self._find(len(self.sizes) * REMEMBERED)
        tokens, tree = merged([self._after(start, shape.depth) for start in starts], shape)
        return Proposal(to_device(tokens, ids.device)[None], None, matched, tree)

    def _after(self, start: int, num: int) -> list[int]:
        """What stands there, so many tokens at most."""
        period, draft = len(self.text) - start, list[int]()
        for k in range(num):
            token = self.text[start + k] if k < period else draft[k - period]
            if token >= self.vocab_size:  # ids of inputs that the target's head does not have
                break
            draft.append(token)
        return draft

    def _index(self) -> None:
        """Every n-gram but those that end with the last token, which nothing follows yet."""
        for end in range(self.indexed, len(self.text) - 1):
            for size in self.sizes:
                if size <= end + 1:
                    gram = tuple(self.text[end + 1 - size : end + 1])
                    self.following[gram] = [end + 1, *self.following.get(gram, [])[: REMEMBERED - 1]]
        self.indexed = max(len(self.text) - 1, 0)

    def _find(self, most: int) -> tuple[list[int], int]:
        """Where matches are followed up, the longest first, among equals the latest, and how long the longest is."""
        found: list[int] = []
        matched = 0
        for size in self.sizes:
            if size <= len(self.text) and len(found) < most:
                starts = self.following.get(tuple(self.text[-size:]), [])
                found += [start for start in starts if start not in found]
                matched = matched or (size if starts else 0)
        return found[:most], matched


def merged(texts: list[list[int]], shape: Shape) -> tuple[list[int], Tree]:
    """Continuations as one tree, the first of them first: tokens and tree. What has no place in the shape is left out."""
    tokens: list[int] = []
    parents: list[int] = []
    children: list[dict[int, int]] = [{}]
    for text in texts:
        node = 0
        for depth, token in enumerate(text[: shape.depth]):
            breadth = shape.size if isinstance(shape, Dynamic) else shape.branching[depth]
            if token not in children[node]:
                if len(tokens) == shape.size or len(children[node]) == breadth:
                    break
                tokens.append(token)
                parents.append(node)
                children[node][token] = len(tokens)
                children.append({})
            node = children[node][token]
    return tokens, Tree(parents)
