"""Generator of mutants of Python files: ``python generate.py``, in the environment that has mutmut.

The operators are those of mutmut 3, applied to the syntax tree of libcst, and one that removes a statement, which
mutmut does not have. Each operator of a module is drawn equally often, because half of all possible mutants replace an
argument by None, and most of those only crash. The request is one JSON object on standard input: ``root``, ``seed``,
``count`` and ``modules`` (paths by module). The reply is a JSON list on standard output. This file imports nothing of
gdrkit, because its environment does not have it.

The generator does not change code that no case can or should check: annotations, decorators, imports, ``__all__``, the
body of ``if TYPE_CHECKING``, type variables and casts, False where None has the same effect, and text for people (log
messages, messages of errors, thread names).
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import libcst as cst
import libcst.matchers as m
from mutmut.mutation.mutators import mutation_operators

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["choose", "main"]

# Handle and getLogger take a name that is only displayed.
_SKIPPED_CALLS = m.Call(
    func=m.OneOf(
        *map(m.Name, ("cast", "TypeVar", "TypeAlias", "Handle")),
        m.Attribute(value=m.Name("_LOG")),
        m.Attribute(attr=m.Name("getLogger")),
    )
)
_TEXT_NAMES = {"message", "what_to_do", "detail"}
_TEXT_ASSIGNMENT = m.Assign(targets=[m.AssignTarget(target=m.OneOf(*map(m.Name, sorted(_TEXT_NAMES))))])
_ALL_ASSIGNMENT = m.OneOf(
    m.Assign(targets=[m.AssignTarget(target=m.Name("__all__"))]), m.AnnAssign(target=m.Name("__all__"))
)
_SKIPPED = m.OneOf(
    m.Annotation(),
    m.Decorator(),
    m.Import(),
    m.ImportFrom(),
    m.If(test=m.Name("TYPE_CHECKING")),
    _SKIPPED_CALLS,
    _TEXT_ASSIGNMENT,
    _ALL_ASSIGNMENT,
)


def _is_text(node: cst.CSTNode) -> bool:
    """Return whether an expression is text for people: a literal of several words, or a composed string."""
    if isinstance(node, cst.SimpleString):
        return " " in node.value
    if isinstance(node, cst.Name):
        return node.value in _TEXT_NAMES
    return isinstance(node, cst.FormattedString | cst.ConcatenatedString)


def _is_text_argument(call: cst.Call, argument: cst.Arg) -> bool:
    keyword = argument.keyword.value if argument.keyword else ""
    # The name of a thread is for people. The daemon flag matters only to a process that ends without a close.
    is_of_thread = m.matches(call.func, m.OneOf(m.Name("Thread"), m.Attribute(attr=m.Name("Thread"))))
    return _is_text(argument.value) or keyword in _TEXT_NAMES or (is_of_thread and keyword in {"name", "daemon"})


def _remove_statement(node: cst.Expr | cst.Raise) -> Iterator[cst.CSTNode]:
    """Replace a call that stands alone, or a raise, by ``pass``."""
    if isinstance(node, cst.Raise) or m.matches(node, m.Expr(value=m.Call())):
        yield cst.Pass()


_OPERATORS = (*mutation_operators, (cst.Expr, _remove_statement), (cst.Raise, _remove_statement))


def _only_makes_false_none(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Return whether a mutation replaces False by None, which is false, too."""
    pairs = [(node, changed)]
    if isinstance(node, cst.Call) and isinstance(changed, cst.Call) and len(node.args) == len(changed.args):
        pairs = list(zip(node.args, changed.args, strict=True))
    new_none = m.OneOf(m.Assign(value=m.Name("None")), m.AnnAssign(value=m.Name("None")), m.Arg(value=m.Name("None")))
    old_false = m.OneOf(
        m.Assign(value=m.Name("False")), m.AnnAssign(value=m.Name("False")), m.Arg(value=m.Name("False"))
    )
    return any(m.matches(old, old_false) and m.matches(new, new_none) for old, new in pairs)


def _concerns_text(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Return whether a mutation only removes a text."""
    if not isinstance(node, cst.Call) or not isinstance(changed, cst.Call):
        return _is_text(node)
    remaining = {id(argument) for argument in changed.args}
    removed = [argument for argument in node.args if id(argument) not in remaining]
    return bool(removed) and all(_is_text_argument(node, argument) for argument in removed)


def _sites(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode, str]]:
    """Yield every mutation below a node: the node, what replaces it, and the name of the operator."""
    if m.matches(node, _SKIPPED):
        return
    for kind, operator in _OPERATORS:
        if isinstance(node, kind):
            name = operator.__name__.removeprefix("operator_").removeprefix("_")
            for changed in operator(node):
                if not _concerns_text(node, changed) and not _only_makes_false_none(node, changed):
                    yield node, changed, name
    for child in node.children:
        if isinstance(node, cst.Call) and isinstance(child, cst.Arg) and _is_text_argument(node, child):
            continue
        yield from _sites(child)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _mutants(root: Path, files: Sequence[str], generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the mutants of one module in the order in which they are drawn."""
    sites: list[tuple[str, cst.Module, cst.CSTNode, cst.CSTNode, str]] = []
    for file in files:
        tree = cst.parse_module((root / file).read_text())
        sites += [(file, tree, *site) for site in _sites(tree)]
    generator.shuffle(sites)
    # The order is the first of each operator, then the second of each, and so on.
    turns: Counter[str] = Counter()
    order = []
    for site in sites:
        turns[site[4]] += 1
        order.append(turns[site[4]])
    sites = [
        site for _, _, site in sorted(zip(order, range(len(sites)), sites, strict=True), key=lambda each: each[:2])
    ]
    for file, tree, node, changed, operator in sites:
        source = tree.code
        replaced = tree.deep_replace(node, changed)
        mutated = replaced.code if isinstance(replaced, cst.Module) else source
        if mutated != source and _compiles(mutated):
            yield {"file": file, "operator": operator, "source": mutated}


def choose(root: Path, modules: Mapping[str, Sequence[str]], *, seed: str, count: int) -> list[dict[str, Any]]:
    """Return `count` mutants, distributed evenly over the modules. The same seed and sources give the same mutants."""
    chosen: list[dict[str, Any]] = []
    for index, (module, files) in enumerate(sorted(modules.items())):
        share = count // len(modules) + (index < count % len(modules))
        drawn = _mutants(root, files, random.Random(f"{seed}/{module}"))
        chosen += [{"module": module, **mutant} for _, mutant in zip(range(share), drawn, strict=False)]
    return chosen


def main() -> None:
    """Read the request from standard input and write the reply to standard output."""
    request = json.load(sys.stdin)
    chosen = choose(Path(request["root"]), request["modules"], seed=request["seed"], count=request["count"])
    json.dump(chosen, sys.stdout)


if __name__ == "__main__":
    main()
