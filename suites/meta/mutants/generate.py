"""Generator of mutants of Python files: ``python generate.py``, in the environment that has mutmut.

``meta.mutants.run`` starts this program. The request is one JSON object on standard input: ``root``, ``seed``,
``count`` and ``modules`` (for each module, the paths of its files). The reply on standard output is a JSON list of
mutants (``module``, ``file``, ``operator``, ``source``). This file imports nothing of gdrkit, because the
environment that has mutmut does not have gdrkit.

The mutation operators of mutmut 3 are applied to the syntax tree of libcst. One more operator removes a statement. Each
operator is drawn equally often in a module. Otherwise half of the sample would replace an argument by None, and most of
these mutants only crash.

The generator does not change code that no case can or should check: annotations, decorators, imports, ``__all__``,
the body of ``if TYPE_CHECKING``, type variables, casts, and text for people (log messages, error messages, thread
names). It does not replace False by None, because None is false, too.
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

__all__ = ["choose_mutants", "main"]

# No case can check these calls: they have no effect at run time, or their arguments are only displayed.
_SKIPPED_CALLS = m.Call(
    func=m.OneOf(
        *map(m.Name, ("cast", "TypeVar", "TypeAlias", "Handle")),
        m.Attribute(value=m.Name("_LOG")),
        m.Attribute(attr=m.Name("getLogger")),
    )
)
# Variables and keyword arguments with these names hold text for people.
_TEXT_NAMES = {"message", "what_to_do", "detail"}
_TEXT_ASSIGNMENT = m.Assign(targets=[m.AssignTarget(target=m.OneOf(*map(m.Name, sorted(_TEXT_NAMES))))])
_DUNDER_ALL_ASSIGNMENT = m.OneOf(
    m.Assign(targets=[m.AssignTarget(target=m.Name("__all__"))]), m.AnnAssign(target=m.Name("__all__"))
)
_SKIPPED_NODES = m.OneOf(
    m.Annotation(),
    m.Decorator(),
    m.Import(),
    m.ImportFrom(),
    m.If(test=m.Name("TYPE_CHECKING")),
    _SKIPPED_CALLS,
    _TEXT_ASSIGNMENT,
    _DUNDER_ALL_ASSIGNMENT,
)


def _is_text(node: cst.CSTNode) -> bool:
    """Return whether an expression is text for people.

    Such text is a literal of several words, an f-string, adjacent literals, or a name in `_TEXT_NAMES`.
    """
    if isinstance(node, cst.SimpleString):
        return " " in node.value
    if isinstance(node, cst.Name):
        return node.value in _TEXT_NAMES
    return isinstance(node, cst.FormattedString | cst.ConcatenatedString)


def _is_text_argument(call: cst.Call, argument: cst.Arg) -> bool:
    """Return whether no case should check an argument of a call, because it is text for people."""
    keyword_name = argument.keyword.value if argument.keyword else ""
    # A thread name is text for people. The daemon flag matters only to a process that ends without close().
    is_thread_call = m.matches(call.func, m.OneOf(m.Name("Thread"), m.Attribute(attr=m.Name("Thread"))))
    return (
        _is_text(argument.value)
        or keyword_name in _TEXT_NAMES
        or (is_thread_call and keyword_name in {"name", "daemon"})
    )


def _remove_statement(node: cst.Expr | cst.Raise) -> Iterator[cst.CSTNode]:
    """Yield ``pass`` as the replacement of a raise, or of a call whose result is not used."""
    if isinstance(node, cst.Raise) or m.matches(node, m.Expr(value=m.Call())):
        yield cst.Pass()


# Each pair has a node type of libcst, and an operator that mutates nodes of this type.
_OPERATORS = (*mutation_operators, (cst.Expr, _remove_statement), (cst.Raise, _remove_statement))


def _only_replaces_false_by_none(node: cst.CSTNode, replacement: cst.CSTNode) -> bool:
    """Return whether a mutation only replaces False by None."""
    old_new_pairs = [(node, replacement)]
    if isinstance(node, cst.Call) and isinstance(replacement, cst.Call) and len(node.args) == len(replacement.args):
        old_new_pairs = list(zip(node.args, replacement.args, strict=True))
    none_matcher = m.OneOf(
        m.Assign(value=m.Name("None")), m.AnnAssign(value=m.Name("None")), m.Arg(value=m.Name("None"))
    )
    false_matcher = m.OneOf(
        m.Assign(value=m.Name("False")), m.AnnAssign(value=m.Name("False")), m.Arg(value=m.Name("False"))
    )
    return any(m.matches(old, false_matcher) and m.matches(new, none_matcher) for old, new in old_new_pairs)


def _changes_only_text(node: cst.CSTNode, replacement: cst.CSTNode) -> bool:
    """Return whether a mutation changes only text for people."""
    if not isinstance(node, cst.Call) or not isinstance(replacement, cst.Call):
        return _is_text(node)
    remaining_argument_ids = {id(argument) for argument in replacement.args}
    removed_arguments = [argument for argument in node.args if id(argument) not in remaining_argument_ids]
    return bool(removed_arguments) and all(_is_text_argument(node, argument) for argument in removed_arguments)


def _find_mutations(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode, str]]:
    """Yield every mutation of a node and its descendants: the node to replace, the replacement, the operator's name."""
    if m.matches(node, _SKIPPED_NODES):
        return
    for node_type, operator in _OPERATORS:
        if isinstance(node, node_type):
            operator_name = operator.__name__.removeprefix("operator_").removeprefix("_")
            for replacement in operator(node):
                if not _changes_only_text(node, replacement) and not _only_replaces_false_by_none(node, replacement):
                    yield node, replacement, operator_name
    for child in node.children:
        if isinstance(node, cst.Call) and isinstance(child, cst.Arg) and _is_text_argument(node, child):
            continue
        yield from _find_mutations(child)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _draw_mutants(root: Path, files: Sequence[str], random_source: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the mutants of one module in random order, but with the operators in turn."""
    # A mutation is a file, its syntax tree, the node to replace, the replacement, and the name of the operator.
    mutations: list[tuple[str, cst.Module, cst.CSTNode, cst.CSTNode, str]] = []
    for file in files:
        tree = cst.parse_module((root / file).read_text())
        mutations += [(file, tree, *mutation) for mutation in _find_mutations(tree)]
    random_source.shuffle(mutations)
    # The first round has one mutation of each operator, the second round another mutation of each operator, and so on.
    count_by_operator: Counter[str] = Counter()
    round_numbers = []
    for *_, operator_name in mutations:
        count_by_operator[operator_name] += 1
        round_numbers.append(count_by_operator[operator_name])
    # sorted() keeps the random order within a round.
    mutations = [
        mutation for _, mutation in sorted(zip(round_numbers, mutations, strict=True), key=lambda pair: pair[0])
    ]
    for file, tree, node, replacement, operator_name in mutations:
        original_source = tree.code
        mutated_tree = tree.deep_replace(node, replacement)
        mutated_source = mutated_tree.code if isinstance(mutated_tree, cst.Module) else original_source
        if mutated_source != original_source and _compiles(mutated_source):
            yield {"file": file, "operator": operator_name, "source": mutated_source}


def choose_mutants(root: Path, modules: Mapping[str, Sequence[str]], *, seed: str, count: int) -> list[dict[str, Any]]:
    """Return `count` mutants, distributed evenly over the modules. The same seed and sources give the same mutants."""
    chosen_mutants: list[dict[str, Any]] = []
    for index, (module, files) in enumerate(sorted(modules.items())):
        module_mutant_count = count // len(modules) + (index < count % len(modules))
        module_mutants = _draw_mutants(root, files, random.Random(f"{seed}/{module}"))
        chosen_mutants += [
            {"module": module, **mutant} for _, mutant in zip(range(module_mutant_count), module_mutants, strict=False)
        ]
    return chosen_mutants


def main() -> None:
    """Read the request from standard input and write the reply to standard output."""
    request = json.load(sys.stdin)
    chosen_mutants = choose_mutants(
        Path(request["root"]), request["modules"], seed=request["seed"], count=request["count"]
    )
    json.dump(chosen_mutants, sys.stdout)


if __name__ == "__main__":
    main()
