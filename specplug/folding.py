"""A recorded pass without what is computed for nothing: arithmetic on shapes, conversions to what is there, the same once more.

torch's tracer writes down every look at a shape, and what follows from it as operations on tensors: up to a tenth of a pass of a
small model. Here a shape counts as fixed if it is the same for inputs that differ wherever inputs may, so that what depends on them
stays as it is. Values are those of the recording, bit by bit.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specplug.config import first_line

log = logging.getLogger(__name__)

END = 2**63 - 1  # of a slice without one
PASSES: list[Callable[[Any], None]] = []  # further ones over a graph, which others add: see fused.py
# What the tracer makes of arithmetic on whole numbers; inputs behind these are scales of 1.
ARITHMETIC: dict[str, tuple[int, Callable[..., int]]] = {
    "aten::Int": (1, lambda a: a),
    "prim::NumToTensor": (1, lambda a: a),
    "aten::neg": (1, lambda a: -a),
    "aten::add": (2, lambda a, b: a + b),
    "aten::sub": (2, lambda a, b: a - b),
    "aten::mul": (2, lambda a, b: a * b),
    "aten::floor_divide": (2, lambda a, b: a // b),
}


def folded(graph: Any, inputs: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """Another graph that does the same as the traced `graph`; that one itself if something in it is not known here.

    `others`: inputs that differ from `inputs` in every size that may differ.
    """
    changed = graph.copy()
    try:
        _fold(changed, inputs, others)
        _share(changed)
        for change in PASSES:
            change(changed)
        torch._C._jit_pass_dce(changed)
    except Exception as error:  # whatever another torch makes of a graph
        log.debug("specplug: a recording is left as it is: %s", first_line(error))
        return graph
    return changed


def _fold(graph: Any, inputs: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Shapes that are known, and conversions and slices that return what they are given."""
    looks = [node for node in graph.nodes() if node.kind() == "aten::size"]
    known = {
        look.output().unique(): size
        for look, size, other in zip(looks, _sizes(graph, inputs), _sizes(graph, others), strict=True)
        if size == other
    }
    sizes = {look.output().unique(): look.output() for look in looks}  # of those that are not known, also as tensors
    for node in list(graph.nodes()):
        kind = node.kind()
        if kind in ARITHMETIC:
            count, function = ARITHMETIC[kind]
            values = _whole(node.inputs(), known)
            if values is not None and all(scale == 1 for scale in values[count:]):
                known[node.output().unique()] = function(*values[:count])
            elif kind == "prim::NumToTensor" and node.input().unique() in sizes:
                sizes[node.output().unique()] = node.input()
        elif (kind == "aten::to" and _converts_nothing(node)) or (kind == "aten::slice" and _is_whole(node)):
            node.output().replaceAllUsesWith(node.inputsAt(0))
        if kind == "aten::Int":
            value = known.get(node.output().unique())
            if value is not None:
                graph.setInsertPoint(node)
                node.output().replaceAllUsesWith(graph.insertConstant(value))
            elif node.input().unique() in sizes:
                node.output().replaceAllUsesWith(sizes[node.input().unique()])


def _share(graph: Any) -> None:
    """What is computed again of the same values, as each layer does with its mask, is computed once; not what may be written to.

    torch's own elimination of common subexpressions takes it that a mask may lie in the keys and values, which a pass writes to.
    """
    written: set[int] = set()
    waiting = [each for node in graph.nodes() for each in _written(node)]
    while waiting:  # what is written to, and all that it may be a part of
        value = waiting.pop()
        holds = value.type().kind() in ("TensorType", "ListType", "TupleType")
        if holds and value.unique() not in written:
            written.add(value.unique())
            waiting.extend(value.node().inputs())
    found: dict[Any, Any] = {}
    for node in graph.nodes():
        given, made = [each.unique() for each in node.inputs()], list(node.outputs())
        if any(each in written for each in given):
            written.update(each.unique() for each in made)
            continue
        if node.kind() == "prim::Constant" and made[0].type().kind() != "TensorType":
            key = made[0].type().str(), repr(made[0].toIValue())
        elif given and len(made) == 1 and made[0].unique() not in written and not node.isNondeterministic():
            key = node.kind(), *given
        else:
            continue
        first = found.setdefault(key, made[0])
        if first is not made[0]:
            made[0].replaceAllUsesWith(first)


def _written(node: Any) -> list[Any]:
    """Of the inputs those that may be written to, by what the operation says of itself."""
    if "!" not in node.schema():
        return []
    return [node.inputsAt(0)] if node.kind().endswith("_") else list(node.inputs())


def _sizes(graph: Any, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """What the looks at shapes say, for these inputs."""
    looking = graph.copy()
    looks = [node for node in looking.nodes() if node.kind() == "aten::size"]
    if not looks:
        return ()
    looking.eraseOutput(0)
    for look in looks:
        looking.registerOutput(look.output())
    looking.makeMultiOutputIntoTuple()
    found = torch._C._create_function_from_graph("sizes", looking)(*inputs)
    return found if isinstance(found, tuple) else (found,)


def _whole(values: Any, known: dict[int, int]) -> list[int] | None:
    """The whole numbers that these are, if all are constants or known."""
    given = list(values)
    # Constants are looked at last: an object of Python's stays with a tensor that is looked at, for as long as the recording does.
    if any(each.unique() not in known and each.node().kind() != "prim::Constant" for each in given):
        return None
    found = []
    for each in given:
        number = known[each.unique()] if each.unique() in known else each.toIValue()
        if isinstance(number, Tensor) and number.ndim == 0 and number.dtype == torch.int64:
            number = int(number)
        if type(number) is not int:
            return None
        found.append(number)
    return found


def _is_whole(node: Any) -> bool:
    """A slice of everything."""
    given = [node.inputsAt(place) for place in (2, 3, 4)]
    if any(each.node().kind() != "prim::Constant" for each in given):
        return False
    start, end, step = (each.toIValue() for each in given)
    return start in (0, None) and end in (END, None) and step == 1


def _converts_nothing(node: Any) -> bool:
    """Of the same kind and in the same place already, and not asked for a copy: then it returns what it is given."""
    given, made = node.inputsAt(0).type(), node.output().type()
    same = given.scalarType() == made.scalarType() is not None and given.device() == made.device() is not None
    return same and node.namedInput("copy").toIValue() is False and node.namedInput("memory_format").toIValue() is None
