"""The shape of the tree: directions of imports, public names, sizes, and what must never be in it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvstore", "tiers", "eviction", "engine_adapter", "bench")
GENERATED = "kvstore.wire.v1"

# The core: what lies directly in kvstore/, but for these modules of its shell, and these packages.
SHELL = {"kvstore.faults", "kvstore.keeper"}
PURE = ("leases", "planning", "tables", "tiering", "trust", "victims")
# What the core may know of outside: the packed records of the wire, and the contract of its policies.
BESIDE_CORE = {"kvstore.wire.packed", "eviction.base"}
# Not Python: compiled from kvstore/native/, absent without a C compiler.
COMPILED = {"kvstore._hash_chain", "kvstore._slab_io", "kvstore._summed_copy"}
IMPURE = {"asyncio", "grpc", "os", "socket", "subprocess", "threading", "time", "torch"}
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "joblib.load", "torch.load", "yaml.load"}


@functools.cache
def modules() -> dict[str, Path]:
    """Name → file of every module of ours that is not generated."""
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith(GENERATED):
                found[name] = file
    return found


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Every module that `name` imports anywhere in it, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree(modules()[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            base = node.module or ""
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(modules())
            found |= submodules or {base}
    return frozenset(found)


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def ours(names: frozenset[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] in PACKAGES}


def modules_below(*packages: str) -> list[str]:
    return sorted(name for name in modules() if any(below(name, package) for package in packages))


@functools.cache
def tracked() -> tuple[Path, ...]:
    """Every text file that is, or is about to be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return tuple(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


@functools.cache
def core() -> frozenset[str]:
    top = {name for name in modules_below("kvstore") if name.count(".") == 1}
    pure = set(modules_below(*(f"kvstore.{package}" for package in PURE)))
    return frozenset(name for name in top | pure if modules()[name].name != "__init__.py") - SHELL


def test_the_core_is_pure_and_knows_the_core_alone() -> None:
    for name in sorted(core() | BESIDE_CORE):
        roots = {imported.partition(".")[0] for imported in imports(name)}
        assert not roots & IMPURE, f"{name} is of the core and must not import {sorted(roots & IMPURE)}"
        wrong = ours(imports(name)) - core() - BESIDE_CORE - COMPILED
        assert not wrong, f"{name} is of the core and imports {sorted(wrong)}"


def test_the_core_has_an_order() -> None:
    """A module imports only what stands above it: there is an order in which they can be read."""
    known = core() | BESIDE_CORE
    order = tuple(TopologicalSorter({name: imports(name) & known for name in known}).static_order())
    position = {name: place for place, name in enumerate(order)}
    vocabulary = ["kvstore.errors", "kvstore.layout", "kvstore.tables.table", "kvstore.store"]
    assert sorted(vocabulary, key=position.__getitem__) == vocabulary


def test_tiers_and_policies_know_the_core_alone() -> None:
    for name in modules_below("tiers", "eviction"):
        package = name.partition(".")[0]
        wrong = {
            other
            for other in ours(imports(name))
            if not below(other, package) and other not in core() | BESIDE_CORE | COMPILED
        }
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_kvstore_never_imports_what_stands_on_it() -> None:
    for name in modules_below("kvstore"):
        wrong = {
            other
            for other in imports(name)
            if other.partition(".")[0] in {"engine_adapter", "bench", "tests"}
        }
        assert not wrong, f"{name} imports {sorted(wrong)}; a command joins by entry point"


def test_the_adapter_imports_no_process_of_the_service() -> None:
    for name in modules_below("engine_adapter"):
        store = ("kvstore.store", *(f"kvstore.{package}" for package in PURE if package != "planning"))
        private = (*store, "kvstore.daemon", "kvstore.keeper", "kvstore.mover", "bench", "tests")
        wrong = {other for other in imports(name) if any(below(other, package) for package in private)}
        assert not wrong, f"{name} imports {sorted(wrong)}; it is a client"


def test_the_keeper_needs_nothing_but_python() -> None:
    """The keeper holds what must outlive everything else, so nothing that it imports can break it or grow it."""
    if "kvstore.keeper" not in modules():
        pytest.skip("no keeper in this tree")
    script = "import sys, kvstore.keeper; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print(*{name.partition('.')[0] for name in sys.modules})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    foreign = set(loaded.stdout.split()) - set(plain.stdout.split()) - sys.stdlib_module_names - {"kvstore"}
    assert not foreign


def test_public_names_are_listed() -> None:
    for name in modules():
        # Nobody imports a microbenchmark: pytest collects them.
        if not re.match(r"bench\.micro\.(bench_|conftest)", name):
            check_public_names(name)


def check_public_names(name: str) -> None:
    module = tree(modules()[name])
    listed: list[str] | None = None
    for node in module.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            listed = ast.literal_eval(node.value)
    defined = {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }
    if listed is None:
        assert not defined or modules()[name].name == "__main__.py", f"{name} has no __all__"
        return
    assert len(listed) == len(set(listed)), f"{name}: __all__ names something twice"
    assert set(listed) <= defined | names_bound_in(module), f"{name}: __all__ names what is not there"


def test_public_names_are_sorted() -> None:
    """In the order that ruff mends: constants, classes, functions (`ruff check --fix`)."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "RUF022",
        "--output-format",
        "concise",
        *PACKAGES,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def names_bound_in(module: ast.Module) -> set[str]:
    bound = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    return bound


def test_modules_and_functions_stay_small() -> None:
    for name in sorted(modules()):
        lines = modules()[name].read_text().count("\n")
        assert lines <= 500, f"{name} has {lines} lines"
        for node in ast.walk(tree(modules()[name])):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= 60, f"{name}.{node.name} has {size} lines"


def test_each_module_says_what_it_is() -> None:
    for name in sorted(modules()):
        assert ast.get_docstring(tree(modules()[name])), f"{name} has no docstring"


def test_nothing_runs_what_it_reads() -> None:
    """Elsewhere pickle over the network was remote code execution in half a dozen engines."""
    found = []
    for file in tracked():
        if file.suffix == ".py":
            found += [f"{file.relative_to(ROOT)}:{line}: {what}" for line, what in unsafe(tree(file))]
    assert not found


def unsafe(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            for name in names:
                if name.partition(".")[0] in UNSAFE_MODULES:
                    yield node.lineno, f"imports {name}"
        elif isinstance(node, ast.Call):
            if (called := dotted(node.func)) in UNSAFE_CALLS:
                yield node.lineno, f"calls {called}"
            if any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords
            ):
                yield node.lineno, "allows pickle"


def dotted(node: ast.expr) -> str:
    """`a.b.c`; empty for what is no chain of names. `ast.unparse` of every call takes seconds."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def test_the_unsafe_loaders_are_found() -> None:
    text = (
        "import pickle\nfrom marshal import loads\neval('1')\ntorch.load(f)\n"
        "np.load(f, allow_pickle=True)\nmodel.eval()\n"
    )
    assert [line for line, _ in unsafe(ast.parse(text))] == [1, 2, 3, 4, 5]


def test_no_file_names_a_machine_or_a_registry() -> None:
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("registry", "npmjs"))]
    paths = [f"/{folder}/" for folder in ("root", "work")] + [r"/home/(?!user\b)\w", "/tmp/" + "brief"]
    pattern = re.compile(
        "|".join([re.escape(host) for host in hosts] + [rf"(?<![\w.}}$-]){path}" for path in paths])
    )
    found = []
    for file in tracked():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found
