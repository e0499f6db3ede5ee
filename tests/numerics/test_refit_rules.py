"""Checks fail for wrong refit tables: every mechanical mutant of the three modules, except equivalent ones."""

import importlib
import inspect
from types import ModuleType

import mutate
import numpy as np
import pytest

from ops.refit.layout import Layout
from ops.refit.plan import build
from tests.unit.refit_models import FAMILIES, ITEM, LOADED, TRAINING, fits, folder, served, size, trained
from tests.unit.test_refit_plan import carry_out

NAMES, TRAINED, SERVED = (
    "stages.backends.megatron.names",
    "stages.backends.megatron.places",
    "stages.backends.vllm.places",
)
PAIRS = [("TP2 PP2", 2), ("EP2", 2), ("TP1", 8), ("TP2", 1), ("TP2 ETP1 EP2", 1)]  # trainer; sampler's ranks
CAUGHT = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    TypeError,
    ValueError,
)
_ALIKE = "both have the same extents but for one that is set behind it"
_BOXES_ONLY = "only the boxes are used, which do not depend on it"
_FIRST = "the first rank begins at 0, and all ranks have the same shapes"
_ONE = "a place of one expert: nothing steps over experts"
_NAME = "all tensors of the rule are alike in what is asked of the first"
_NONE_EMPTY = "no rank of these cases is without rows of the vocabulary"
_ROWS = "places do not ask how many rows a parameter has"
_HELD_ELSEWHERE = "the first stage holds the same numbers"
EQUIVALENT: dict[str, dict[str, str]] = {
    NAMES: {
        "parameters: 1 -> 2 #2": _HELD_ELSEWHERE,
        "parameters: Parameter(shape, pieces, DIVIDED[TIED.kind], copy=True) -> "
        "Parameter(shape, pieces, DIVIDED[TIED.kind])": "places do not ask which of two is the original",
        "parameters: True -> False": "places do not ask which of two is the original",
        "_laid_out: 0 -> -1": _NAME,
        "_laid_out: 0 -> -1 #8": _NAME,
        "_laid_out: stop > start -> stop >= start": _NONE_EMPTY,
        "_laid_out: 0 -> 1 #10": _ROWS,
        "_laid_out: 0 -> -1 #10": _ROWS,
        "_laid_out: 0 -> -1 #11": _NAME,
        "_laid_out: 0 -> -1 #17": _NAME,
    },
    TRAINED: {"places: 0 -> 1 #3": _ONE, "places: 0 -> -1 #3": _ONE},
    SERVED: {
        "_grouped: part.groups >= rank.ranks -> part.groups > rank.ranks": "with as many groups as ranks, each has one",
        "_grouped: 'qkv' -> 'qkv_'": "the shortest of three ends the loop",
        "tensors: 1 -> 2 #2": _BOXES_ONLY,
        "tensors: 1 -> 0 #2": _BOXES_ONLY,
        "shapes: 0 -> -1": _FIRST,
        "shapes: 1 -> 2": _BOXES_ONLY,
        "shapes: 1 -> 0": _BOXES_ONLY,
        "_Rank.stacked: 0 -> -1 #2": _ALIKE,
    },
}
RULES = {NAMES: ("parameters", "add", "_add", "_laid_out", "_grouped", "qkv_rows")}  # places do not depend on the rest


def check(megatron: ModuleType, vllm: ModuleType) -> None:
    """The tables give what vLLM's own loader would produce from the same folder, for all families."""
    for family, decoder in FAMILIES.items():
        model = folder(decoder)
        for training, ranks in PAIRS:
            if not fits(family, training):
                continue
            parts, tensors = TRAINING[training], megatron.tensors(decoder, "bfloat16")
            assert vllm.tensors(decoder, "bfloat16") == {
                name: tensor
                for name, tensor in tensors.items()
                if not name.endswith(LOADED) and (".self_attn." not in name or family != "deepseek_v3")
            }, family
            source = Layout(tensors, [megatron.places(decoder, part, ITEM) for part in parts])
            destination = Layout(tensors, [vllm.places(decoder, rank, ranks, ITEM) for rank in range(ranks)])
            given = [{n: a.view(np.uint8).ravel() for n, a in trained(decoder, p, model).items()} for p in parts]
            shapes = vllm.shapes(decoder, ranks)
            taken = [{n: np.full(size(n, s), 0xEE, np.uint8) for n, s in shapes.items()} for _ in range(ranks)]
            carry_out(build(source, destination, segment_bytes=4096), given, taken)
            for rank, memory in enumerate(taken):
                wanted = served(decoder, rank, ranks, model)
                assert {name: array.shape for name, array in wanted.items()} == shapes, family
                for name, array in wanted.items():
                    assert (memory[name].view(array.dtype).reshape(shapes[name]) == array).all(), (family, name)


def survives(name: str, source: str) -> bool:
    modules = {each: importlib.import_module(each) for each in (NAMES, TRAINED, SERVED)}
    try:
        modules[name] = mutate.load(source, modules[name])
        if name == NAMES:
            places = mutate.load(inspect.getsource(modules[TRAINED]), modules[TRAINED])
            places.parameters = modules[NAMES].parameters  # type: ignore[attr-defined]
            modules[TRAINED] = places
        check(modules[TRAINED], modules[SERVED])
    except CAUGHT:
        return False
    return True


def made_of(name: str) -> dict[str, str]:
    """Return the relevant mutants of a module: name and source."""
    source = inspect.getsource(importlib.import_module(name))
    found = {
        mutant: changed
        for mutant, changed in mutate.mutants(source)
        if name not in RULES or mutant.partition(":")[0] in RULES[name]
    }
    assert survives(name, source) and len(found) > 20
    return found


@pytest.mark.search
@pytest.mark.parametrize("name", EQUIVALENT)
def test_only_equivalent_mutants_survive(name: str) -> None:
    made = made_of(name)
    assert {mutant for mutant, changed in made.items() if survives(name, changed)} == EQUIVALENT[name].keys()


@pytest.mark.parametrize("name", EQUIVALENT)
def test_of_every_twentieth_mutant_only_equivalent_ones_survive(name: str) -> None:
    made = dict(list(made_of(name).items())[::20])
    survivors = {mutant for mutant, changed in made.items() if survives(name, changed)}
    assert survivors == EQUIVALENT[name].keys() & made.keys()
