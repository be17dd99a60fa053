"""A foreign checkpoint's arrays under the names of a run's model, or every difference at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from recipes.artifacts.foreign import MOMENTS, Foreign

Parts = list[torch.Tensor]  # consecutive parts of a flattened array
SHOWN = 8  # differences of a kind that are listed by name


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The arrays of a run's model."""

    parameters: dict[str, tuple[int, ...]]  # shapes, in the model's order, tied ones once
    modules: dict[str, type[nn.Module]]  # that hold them
    copies: dict[str, str]  # further names of tied parameters
    buffers: dict[str, tuple[int, ...]]
    ignorable: tuple[str, ...]  # patterns of names that older versions of the model saved


def expected_of(network: nn.Module) -> Expected:
    """From a model, which may be on the meta device."""
    first: dict[int, str] = {}
    parameters, modules, copies = {}, {}, {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            copies[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        parameters[name] = tuple(parameter.shape)
        modules[name] = type(network.get_submodule(name.rpartition(".")[0]))
    saved = set(network.state_dict(keep_vars=True))
    buffers = {n: tuple(b.shape) for n, b in network.named_buffers() if n in saved}
    ignorable = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    return Expected(
        parameters=parameters,
        modules=modules,
        copies=copies,
        buffers=buffers,
        ignorable=tuple(ignorable),
    )


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Every array of a run's model: `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `buffer/…`.

    `rule` says how moments without names were matched; empty where they had names.
    """

    parts: dict[str, Parts]
    shapes: dict[str, tuple[int, ...]]
    rule: str


def match(found: Foreign, expected: Expected) -> Matched:
    """Find every array of the model in the checkpoint.

    Raises:
        ValueError: names or shapes differ; all of them, in one text.
    """
    rename = _renaming([*found.weights, *found.copies], expected)
    weights, faults = _tied(
        {rename(name): parts for name, parts in found.weights.items()}, expected
    )
    saved = {rename(name): value for name, value in found.copies.items()}
    buffers = {
        name: [saved[name].reshape(-1)] if name in saved else weights.pop(name, [])
        for name in expected.buffers
    }
    faults += _difference("is missing", [n for n in expected.parameters if n not in weights])
    strange = [
        name
        for name in weights
        if name not in expected.parameters
        and not any(re.search(pattern, name) for pattern in expected.ignorable)
    ]
    faults += _difference("is not in the run file's model", strange)
    faults += _difference("(a buffer) is missing", [n for n, parts in buffers.items() if not parts])
    shapes = {rename(name): shape for name, shape in found.shapes.items()}
    shapes = {expected.copies.get(name, name): shape for name, shape in shapes.items()}
    faults += _difference(
        "has another shape",
        [
            f"{name} {list(shapes[name])} (expected {list(shape)})"
            for name, shape in expected.parameters.items()
            if name in shapes and shapes[name] != shape
        ],
    )
    if faults:
        raise ValueError(f"{found.kind}: another model was trained there:\n" + "\n".join(faults))
    moments, rule, masters = _moments(found, expected, rename)
    whole = {f"weight/{n}": masters.get(n, weights[n]) for n in expected.parameters}
    whole |= {f"{kind}/{n}": moments[kind][n] for kind in MOMENTS for n in expected.parameters}
    whole |= {f"buffer/{name}": parts for name, parts in buffers.items()}
    named = {**expected.parameters, **expected.buffers}
    full = {name: named[name.partition("/")[2]] for name in whole}
    _check_sizes(whole, full)
    return Matched(parts=whole, shapes=full, rule=rule)


def _renaming(names: list[str], expected: Expected) -> Callable[[str], str]:
    """Strip what wrappers put before the model's own names: module., network., _orig_mod. …"""
    known = {*expected.parameters, *expected.copies, *expected.buffers}

    def plain(name: str) -> str:
        return name.replace("_orig_mod.", "").removeprefix("module.")

    counts: dict[str, int] = {"": 0}
    for name in map(plain, names):
        parts = name.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in known:
                prefix = "".join(f"{part}." for part in parts[:cut])
                counts[prefix] = counts.get(prefix, 0) + 1
    prefix = max(counts, key=lambda p: (counts[p], -len(p)))
    return lambda name: plain(name).removeprefix(prefix)


def _tied(weights: dict[str, Parts], expected: Expected) -> tuple[dict[str, Parts], list[str]]:
    """Tied parameters once, under the name that the run's model gives them."""
    faults = []
    for copy, kept in expected.copies.items():
        if copy not in weights:
            continue
        parts = weights.pop(copy)
        if kept not in weights:  # safetensors leaves out one of the two, not always the same
            weights[kept] = parts
        elif not torch.equal(torch.cat(parts), torch.cat(weights[kept])):
            faults.append(
                f"  {copy} and {kept} differ, but the run file's model ties them; set "
                "model.config.tie_word_embeddings=false"
            )
    return weights, faults


def _difference(what: str, names: Iterable[str]) -> list[str]:
    listed = list(names)
    more = [f"  … and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
    return [f"  {name} {what}" for name in listed[:SHOWN]] + more


def _moments(
    found: Foreign, expected: Expected, rename: Callable[[str], str]
) -> tuple[dict[str, dict[str, Parts]], str, dict[str, Parts]]:
    """Moments by name, the rule that gave the names, and fp32 weights that lay beside them."""
    masters: dict[str, Parts] = {}
    moments: dict[str, dict[str, Parts]] = {kind: {} for kind in MOMENTS}
    if found.numbered is None:
        rule = ""
        for kind, values in found.moments.items():
            for name, parts in values.items():
                plain = rename(name)
                moments[kind][expected.copies.get(plain, plain)] = parts
    else:
        rule, names = _order(found, expected)
        for number, name in names.items():
            state = found.numbered.get(number, {})
            for kind in MOMENTS:
                if kind in state:
                    moments[kind][name] = [state[kind].reshape(-1)]
            if "weight" in state:
                masters[name] = [state["weight"].reshape(-1)]
    lacking = [n for n in expected.parameters if any(n not in moments[k] for k in MOMENTS)]
    if lacking:
        faults = _difference("has no Adam state: it was frozen, or no update came yet", lacking)
        raise ValueError(
            f"{found.kind}: the optimizer's state is not complete:\n" + "\n".join(faults)
        )
    return moments, rule, masters


def _order(found: Foreign, expected: Expected) -> tuple[str, dict[int, str]]:
    """Which parameter each number of the optimizer is: by its groups, and checked by every shape.

    Raises:
        ValueError: no known rule fits, or two do that disagree.
    """
    assert found.numbered is not None
    fitting: dict[str, dict[int, str]] = {}
    for rule, groups in _rules(expected):
        if [len(group) for group in groups] != [len(numbers) for numbers in found.groups]:
            continue
        names = {
            number: name
            for numbers, group in zip(found.groups, groups, strict=True)
            for number, name in zip(numbers, group, strict=True)
        }
        if names not in fitting.values() and all(
            tuple(found.numbered[number]["exp_avg"].shape) == expected.parameters[name]
            for number, name in names.items()
            if number in found.numbered
        ):
            fitting[rule] = names
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    why = f"{' and '.join(fitting)} both fit" if fitting else "none of the usual orders fits"
    sizes = ", ".join(str(len(numbers)) for numbers in found.groups)
    raise ValueError(
        f"{found.kind}: the optimizer's state has no parameter names, only numbers, in groups of "
        f"{sizes} parameters; {why} the run file's {len(expected.parameters)} parameters. Save it "
        "again with an optimizer that was given model.named_parameters()"
    )


def _rules(expected: Expected) -> Iterator[tuple[str, list[list[str]]]]:
    """The ways in which recipes divide parameters into an optimizer's groups."""
    plain = {"the model's order": list(expected.parameters)}
    plain["the order of the names"] = sorted(expected.parameters)

    def is_norm(name: str) -> bool:
        return "norm" in expected.modules[name].__name__.lower()

    decays: dict[str, Callable[[str], bool]] = {
        "matrices first": lambda n: len(expected.parameters[n]) >= 2,
        "all but biases and norms first": lambda n: not (n.endswith("bias") or is_norm(n)),
        "all but biases, norms and embeddings first": lambda n: (
            not (n.endswith("bias") or is_norm(n) or issubclass(expected.modules[n], nn.Embedding))
        ),
    }
    for order, names in plain.items():
        yield order, [names]
        for split, decay in decays.items():
            first = [name for name in names if decay(name)]
            second = [name for name in names if not decay(name)]
            yield f"{order}, {split}", [first, second]
            yield f"{order}, {split.replace('first', 'last')}", [second, first]


def _check_sizes(parts: dict[str, Parts], shapes: dict[str, tuple[int, ...]]) -> None:
    faults = [
        f"  {name} has {sum(p.numel() for p in held)} elements, expected {math.prod(shapes[name])}"
        for name, held in parts.items()
        if sum(p.numel() for p in held) != math.prod(shapes[name])
    ]
    if faults:
        raise ValueError("parts of arrays are missing:\n" + "\n".join(faults[:SHOWN]))
