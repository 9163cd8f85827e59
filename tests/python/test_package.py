"""What is promised before any model is loaded."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from conftest import python
from octavo import _octavo

IMPORT_BUDGET_S = 0.050


def test_importing_is_fast_and_imports_nothing_heavy() -> None:
    code = """
import sys, time
begun = time.perf_counter()
import octavo
took = time.perf_counter() - begun
print(took, sorted(name for name in sys.modules if name.split('.')[0] in ('numpy', 'asyncio', 'huggingface_hub')))
"""
    # The best of some runs: the machine may be busy, the promise is about the package.
    runs = [python(code).stdout.split(" ", 1) for _ in range(5)]
    assert min(float(took) for took, _ in runs) < IMPORT_BUDGET_S
    assert {modules.strip() for _, modules in runs} == {"[]"}


def test_all_names_resolve_and_are_listed() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert set(dir(octavo)) == set(octavo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Llama'"):
        octavo.Llama  # noqa: B018


def test_errors_are_also_the_built_in_ones() -> None:
    for error, builtin in [
        (octavo.InvalidRequestError, ValueError),
        (octavo.DeadlineExceededError, TimeoutError),
        (octavo.OutOfMemoryError, MemoryError),
    ]:
        assert issubclass(error, builtin)
    for name in octavo.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(octavo, name), octavo.OctavoError)


SPECIAL = {"__new__", "__len__", "__bool__", "__iter__", "__next__", "__enter__", "__exit__"}


def test_the_stub_is_the_module() -> None:
    """Every class, member and parameter of the extension is in its stub under the same name, and nothing else is."""
    stub = (Path(octavo.__file__).parent / "_octavo.pyi").read_text()
    members: dict[str, set[str]] = {}
    signatures: dict[str, list[str]] = {}
    owner = ""
    for match in re.finditer(r"^(    )?(class|def) (\w+)(?:\((.*?)\) ?->|[:(])", stub, re.MULTILINE | re.DOTALL):
        indent, kind, name, parameters = match.groups()
        if kind == "class":
            owner = name
            members[owner] = set()
        elif indent:
            members[owner].add(name)
            signatures[f"{owner}.{name}"] = re.findall(r"(\w+) ?:", parameters or "")
        else:
            members[name] = set()
            owner = ""
    public = {name for name in dir(_octavo) if not name.startswith("_")}
    assert public == set(members)
    for name in public:
        found = getattr(_octavo, name)
        if not inspect.isclass(found):
            continue
        special = SPECIAL & set(vars(found))
        assert {member for member in vars(found) if not member.startswith("_")} | special == members[name], name
        for member in members[name] - special:
            value = getattr(found, member)
            if callable(value):
                actual = [p for p in inspect.signature(value).parameters if p != "self"]
                assert actual == signatures[f"{name}.{member}"], f"{name}.{member}"


def test_help_and_the_stub_say_the_same() -> None:
    """Every docstring, and every parameter with its kind and default, of the extension as its stub has them."""
    stub = ast.parse((Path(octavo.__file__).parent / "_octavo.pyi").read_text())
    told = 0
    for node in stub.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        thing = getattr(_octavo, node.name)
        members = node.body if isinstance(node, ast.ClassDef) else []
        pairs: list[tuple[str, ast.ClassDef | ast.FunctionDef, object]] = [(node.name, node, thing)]
        for member in members:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                pairs.append((f"{node.name}.{member.name}", member, inspect.getattr_static(thing, member.name)))
        for name, wanted, static in pairs:
            found = getattr(static, "__func__", static)
            doc = ast.get_docstring(wanted)
            assert (found.__doc__ and inspect.cleandoc(found.__doc__)) == doc, name
            told += doc is not None
            is_property = any(getattr(mark, "id", "") == "property" for mark in wanted.decorator_list)
            if isinstance(wanted, ast.FunctionDef) and not is_property:
                assert parameters(found) == written(wanted), name
    assert told > 100


def parameters(function: object) -> list[tuple[str, str, str | None]]:
    """Name, kind and default of each, but for ``self``."""
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [
        (one.name, one.kind.name, None if one.default is one.empty else repr(one.default))
        for one in found
        if one.name != "self"
    ]


def written(function: ast.FunctionDef) -> list[tuple[str, str, str | None]]:
    """Likewise, as a stub has it."""
    arguments = function.args
    plain = arguments.posonlyargs + arguments.args
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
    every = [(one, "POSITIONAL_OR_KEYWORD", default) for one, default in zip(plain, defaults, strict=True)]
    every += [
        (one, "KEYWORD_ONLY", default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [
        (one.arg, kind, None if default is None else repr(ast.literal_eval(default)))
        for one, kind, default in every
        if one.arg != "self"
    ]


def test_the_stub_satisfies_stubtest(tmp_path: Path) -> None:
    pytest.importorskip("mypy.stubtest", reason="mypy is in octavo[test]")
    allowed = tmp_path / "allowed"
    # Classes that only the engine makes have no constructor, which a stub cannot say. All are copied alike.
    names = (r"octavo\._octavo\.\w+\.__(new|init|repr|str|replace|copy|deepcopy)__", r"octavo\._octavo\.__all__")
    allowed.write_text("\n".join(names))
    command = [sys.executable, "-m", "mypy.stubtest", "octavo._octavo", "--allowlist", str(allowed)]
    command += ["--ignore-unused-allowlist", "--ignore-disjoint-bases"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parameters_are_values() -> None:
    params = octavo.SamplingParams(temperature=0.5, stop=["x"])
    assert params == octavo.SamplingParams(temperature=0.5, stop=["x"])
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        octavo.SamplingParams(temprature=0.5)  # type: ignore[call-arg]
