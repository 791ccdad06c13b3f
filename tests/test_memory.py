"""What the plugin adds to memory: gamma + 1 rows of logits, gamma cache slots, and the draft's own cache. No more."""

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from torch.utils._python_dispatch import TorchDispatchMode

import specplug

GAMMA, VOCAB = 4, 4096


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_no_tensor_is_larger_than_the_logits_of_a_round(engine, sample):
    """The vocabulary is so large beside the model that a (prompt x V) or (G x V x V) tensor would stand out."""
    target = make_model(vocab_size=VOCAB)
    ids = torch.cat([prompt(length=40, vocab_size=VOCAB), prompt(length=40, seed=1, vocab_size=VOCAB)])
    call = {"max_new_tokens": 12, "do_sample": sample}
    with specplug.attach(target, noisy_copy(target), gamma=GAMMA, engine=engine), Largest() as largest:
        target.generate(ids, **call)
    weights = VOCAB * 32
    assert largest.elements <= max((GAMMA + 1) * len(ids) * VOCAB, weights)


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_the_cache_has_gamma_more_slots_at_most(engine):
    target = make_model()
    lengths = []

    def note(module, args, kwargs, output):
        lengths.append((output.logits.shape[1], output[specplug.cache.NAME].get_seq_length()))

    draft = noisy_copy(target)
    hook = target.register_forward_hook(note, with_kwargs=True)
    with specplug.attach(target, draft, gamma=GAMMA, engine=engine):
        out = target.generate(prompt(), max_new_tokens=30, do_sample=False)
    hook.remove()
    assert max(length for _, length in lengths) <= out.shape[1] + GAMMA
    assert max(width for width, _ in lengths) == GAMMA + 1
