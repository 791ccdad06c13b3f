"""Layers with room: what transformers' own layer holds, without copying the text at each pass."""

import copy
import random

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import specplug
from specplug import cache as caches
from specplug.cache import NAME, ROOM, RoomyLayer


def states(width, seed, rows=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((rows, 3, width, 4), generator=generator) for _ in range(2)]


def filled(num_layers=2, width=5):
    cache = DynamicCache()
    for number in range(num_layers):
        cache.update(*states(width, number), number)
    return cache


def held(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def same(one, other):
    return all(
        torch.equal(a, b) for pair, twin in zip(one, other, strict=True) for a, b in zip(pair, twin, strict=True)
    )


@pytest.mark.parametrize("seed", range(4))
def test_it_holds_what_a_plain_layer_holds_through_passes_rejections_and_paths(seed):
    choose = random.Random(seed)
    plain, roomy = filled(), filled()
    caches.prepare_for_crop(plain)
    caches.prepare_for_crop(roomy, roomy=True)
    assert all(type(layer) is RoomyLayer for layer in roomy.layers)
    for step in range(60):
        width = choose.randint(1, 9)
        for number in range(2):
            new = states(width, 100 * step + number)
            seen = plain.update(*new, number)
            assert same([seen], [roomy.update(*new, number)])
        places = sorted(choose.sample(range(width), choose.randint(1, width)))
        kept = choose.choice([places, list(range(len(places)))])
        caches.keep(plain, width, kept)
        caches.keep(roomy, width, kept)
        assert plain.get_seq_length() == roomy.get_seq_length() and same(held(plain), held(roomy))


def test_nothing_is_copied_until_the_room_is_used_up():
    cache = filled(1)
    caches.prepare_for_crop(cache, roomy=True)
    layer, places = cache.layers[0], []
    for step in range(ROOM + 40):
        cache.update(*states(1, step), 0)
        places.append(layer.keys.data_ptr())
    assert places[0] == places[ROOM] != places[ROOM + 1] == places[-1]
    assert layer.rooms.tensors[0].shape[3] < 2 * layer.get_seq_length()  # and a short text pays for no long maximum


def test_tensors_that_somebody_else_put_there_are_not_lost():
    cache = filled(1)
    caches.prepare_for_crop(cache, roomy=True)
    cache.update(*states(2, 7), 0)
    cache.batch_select_indices(torch.tensor([0, 0]))
    before = held(cache)
    cache.update(*states(1, 8, rows=2), 0)
    assert same([(keys[:, :, :-1], values[:, :, :-1]) for keys, values in held(cache)], before)


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_the_caller_gets_plain_layers_back_and_plain_decoding_goes_on_from_them(engine):
    model, ids = make_model("llama"), prompt(9)
    options = dict(do_sample=False, return_dict_in_generate=True, max_new_tokens=12)
    expected = model.generate(ids, **options)
    with specplug.attach(model, "lookup", gamma=3, engine=engine):
        found = model.generate(ids, **options)
    cache = found[caches.NAME]
    assert all(type(layer) is DynamicLayer for layer in cache.layers)
    assert cache.get_seq_length() == expected[caches.NAME].get_seq_length()
    longer = [
        model.generate(each.sequences, **{**options, caches.NAME: copy.deepcopy(each[caches.NAME])}).sequences
        for each in (expected, found)
    ]
    assert torch.equal(*longer)


@pytest.mark.parametrize("graph", ["capture", "off"])
def test_windows_are_as_plain_decoding_leaves_them_wherever_a_streamer_raises(graph):
    """Also at the last draft of a round that keeps them all: there is nothing to take back then, but what is behind the window."""
    model = make_model("mistral")
    model.generation_config.eos_token_id = None
    ids, call = prompt(9), dict(do_sample=False, max_new_tokens=24)
    expected = model.generate(ids, **call)

    class Raises:
        def put(self, _):
            self.left -= 1
            if not self.left:
                raise RuntimeError("no more")

    for number in range(2, 24):
        cache, streamer = DynamicCache(config=model.config), Raises()
        streamer.left = number
        with (
            specplug.attach(model, noisy_copy(model, 0.01), gamma=4, engine="rounds", graph=graph),
            pytest.raises(RuntimeError, match="no more"),
        ):
            model.generate(ids, streamer=streamer, **call, **{NAME: cache})
        assert all(layer.keys.shape[2] == model.config.sliding_window - 1 for layer in cache.layers)
        text = expected[:, : cache.get_seq_length() + 1]
        rest = expected.shape[1] - text.shape[1]
        assert torch.equal(model.generate(text, do_sample=False, max_new_tokens=rest, **{NAME: cache}), expected)
