"""A recording that leaves out what is computed for nothing returns what it returned before, and keeps what depends on its inputs."""

from collections import Counter

import pytest
import torch
from conftest import make_model, prompt

import specplug
from specplug import capture, folding, recording


def traced(function, *inputs):
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, lambda _: "", True, False, None, [])
    return graph


def kinds(graph):
    return Counter(node.kind() for node in graph.nodes())


def run(graph, *inputs):
    return torch._C._create_function_from_graph("forward", graph)(*inputs)


def rotated(x):
    """As position embeddings do: half of the last size, which is fixed; the first size is the input's own."""
    half = x.shape[-1] // 2
    x = x.to(torch.float32)
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x + turned).view(x.shape[0], -1, half) * x.shape[0]


def test_fixed_sizes_are_folded_and_others_are_not():
    x, other = torch.randn(3, 8), torch.randn(5, 8)
    graph = traced(rotated, x)
    changed = folding.folded(graph, [x], [other])
    for each in (x, other, torch.randn(1, 8), torch.randn(9, 8)):
        assert torch.equal(run(changed, each), rotated(each))
    before, after = kinds(graph), kinds(changed)
    assert before["aten::floor_divide"] and not after["aten::floor_divide"] and not after["aten::to"]
    assert after["aten::size"] == 1 < before["aten::size"]


def test_what_differs_nowhere_would_be_folded():
    """Negative control: with other inputs of the same size the first one is taken for fixed, and the result is wrong."""
    x = torch.randn(3, 8)
    wrong = folding.folded(traced(rotated, x), [x], [torch.randn(3, 8)])
    assert torch.equal(run(wrong, x), rotated(x))
    with pytest.raises(RuntimeError):
        run(wrong, torch.randn(5, 8))


def test_a_conversion_that_does_something_stays():
    def converted(x):
        return x.to(torch.float64) + x.to(torch.float32, copy=True).mul_(2) + x

    x = torch.randn(4)
    changed = folding.folded(traced(converted, x), [x], [torch.randn(5)])
    assert kinds(changed)["aten::to"] == 2 and torch.equal(run(changed, x), converted(x))


def test_the_same_is_computed_once_but_not_what_is_written_to():
    """A mask is repeated by each layer; a buffer that was written to meanwhile is another value."""

    def layers(mask, buffer, states, other):
        total = torch.zeros(())
        for number in range(3):
            wide = torch.where(mask.repeat(2, 1), 0.0, 1.0)
            before = buffer.sum(0)
            buffer[:, 1:].copy_(states * number)
            torch.add(states, number, out=other)
            total = total + other.sum(0).sum()
            total = total + (wide * (before + buffer.sum(0))).sum()
        return total

    inputs = torch.rand(2, 4) > 0.5, torch.randn(3, 4), torch.randn(3, 3), torch.randn(3, 3)
    graph = traced(layers, *(each.clone() for each in inputs))
    changed = folding.folded(graph, [each.clone() for each in inputs], [each.clone() for each in inputs])
    assert kinds(graph)["aten::repeat"] == 3 and kinds(changed)["aten::repeat"] == kinds(changed)["aten::where"] == 1
    assert kinds(changed)["aten::sum"] == kinds(graph)["aten::sum"] == 15
    expected, found = ([each.clone() for each in inputs] for _ in range(2))
    assert torch.equal(run(changed, *found), layers(*expected))
    assert all(map(torch.equal, found, expected))


def test_a_graph_that_is_not_known_is_left_as_it_is(monkeypatch):
    x = torch.randn(3, 8)
    graph = traced(rotated, x)
    monkeypatch.setattr(folding, "_share", lambda graph: 1 / 0)
    assert folding.folded(graph, [x], [torch.randn(5, 8)]) is graph
    assert torch.equal(run(graph, x), rotated(x))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recordings_of_models_are_folded(kind, monkeypatch):
    """No sizes are divided or compared any more, and the check at each width finds them equal to passes."""
    graphs = []
    real = folding.folded

    def noted(graph, inputs, others):
        graphs.append((graph, real(graph, inputs, others)))
        return graphs[-1][1]

    monkeypatch.setattr(recording, "folded", noted)
    model = make_model(kind, seed=5)
    with specplug.attach(model, "lookup", gamma=3) as plugin:
        plugin.record_after = 0
        ids = prompt(8).repeat(1, 4)
        found = [model.generate(ids[:, : 20 + n], max_new_tokens=20, do_sample=False) for n in range(4)]
    recordings = capture._KNOWN[model][1].values()
    assert graphs and any(each.ready for each in recordings) and not any(each.refused for each in recordings)
    for before, after in graphs:
        assert len(list(after.nodes())) < 0.8 * len(list(before.nodes()))
        assert not kinds(after)["aten::floor_divide"] and kinds(after)["aten::size"] < kinds(before)["aten::size"] / 2
    for n, each in enumerate(found):
        assert torch.equal(each, model.generate(ids[:, : 20 + n], max_new_tokens=20, do_sample=False))
